"""Data preparation, which runs before the training and on the same GPU."""

from __future__ import annotations

from collections.abc import Iterator

from ..messages import Messages, gib
from ..units import GIB
from .facts import Facts
from .finding import Finding, Severity, finding

# prepare_data.py puts the audio tokenizer on the GPU in float32. On 8 GB cards, of which 6 to 7 GiB are free, that and
# the activations of one long recording are what people report to run out.
_TIGHT_BYTES = 8 * GIB


def check_preparation(facts: Facts, say: Messages) -> Iterator[Finding]:
    """Yields a finding where the codec will share a small GPU.

    Source: upstream ``finetuning/prepare_data.py``, ``main``: ``--device auto`` is the rank's own device.
    """
    if facts.prepare_device is None or facts.prepare_device == "cpu" or not facts.torch.sees_gpu:
        return
    free = facts.torch.free_bytes
    severity: Severity = "warning" if free < _TIGHT_BYTES else "note"
    yield finding(say, "preparation", severity, "codec_on_gpu", device=facts.prepare_device, free=gib(free))
