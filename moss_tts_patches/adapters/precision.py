"""Which half precision the frozen base can have on a card."""

from __future__ import annotations

BF16_CAPABILITY = (8, 0)


def base_precision(wanted: str, capability: tuple[int, int] | None, card: str) -> tuple[str, str | None]:
    """Chooses the mixed precision of a run whose base is frozen.

    Args:
        wanted: ``no``, ``bf16`` or ``fp16``, as given to the trainer.
        capability: of the GPU, or None without one.
        card: its name.

    Returns:
        ``(mixed precision, why it is not the one that was wanted or None)``.
    """
    if wanted == "bf16" and capability is not None and capability < BF16_CAPABILITY:
        have, need = (".".join(map(str, pair)) for pair in (capability, BF16_CAPABILITY))
        return "fp16", (
            f"{card} has compute capability {have} and no bf16 arithmetic ({need} and more have it): the frozen base "
            "is loaded in fp16, the adapters train in float32 under a loss scaler"
        )
    return wanted, None
