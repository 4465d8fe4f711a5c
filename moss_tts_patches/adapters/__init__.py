"""LoRA and QLoRA: PEFT injects and merges, bitsandbytes quantises; here is what is chosen, checked and saved."""

from __future__ import annotations

import logging


def mute_bitsandbytes() -> None:
    """Silences what PEFT imports: it warns that a kernel for 4-bit inference on the CPU is missing; nobody needs it."""
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
