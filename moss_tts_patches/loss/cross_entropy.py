"""Cross entropy of a linear head with hand-written gradients, so that logits never have to be stored.

Two routes, chosen by the number of logits of the whole micro-batch:

* direct: the logits of all rows at once, three matrix products (a codebook of 1025 entries);
* sliced: blocks of frames for the loss and the input's gradient, then slices of the vocabulary for the weight's
  gradient, four products. Each slice of the weight's gradient is one matrix product over all frames, hence rounded
  once, however many frames there are.

Worked example, MOSS-TTS-Local's text head at 350 supervised frames: 350 x 151,936 logits are 53 million, 203 MiB in
float32 and several times that through autograd. Sliced: blocks of 110 frames, slices of 47,935 vocabulary entries,
64 MiB of float32 at a time.

Source: softmax cross entropy and its gradient ``softmax(logits) - onehot(label)``; upstream computes it through
``transformers.loss.loss_utils.ForCausalLMLoss`` on ``logits.float()``.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F

from .problem import IGNORE_INDEX

# 2**24 logits are 64 MiB in float32: beside 0.4 GiB of depth activations they do not set the peak, and a matrix
# product of that size keeps a GPU busy.
LOGITS_AT_ONCE = 2**24


def cross_entropy_direct(
    hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, factor: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Loss and both gradients from one set of logits.

    Args:
        hidden: ``[frames, hidden]`` in the compute dtype.
        weight: ``[classes, hidden]`` in the compute dtype.
        labels: ``[frames]`` int64.
        factor: scalar float32, the derivative of the final loss by this channel's sum.

    Returns:
        ``(sum of losses [] float32, gradient of hidden, gradient of weight)``, gradients in the compute dtype.
    """
    log_probabilities = torch.log_softmax(F.linear(hidden, weight), dim=-1, dtype=torch.float32)
    loss, gradient = _loss_and_logit_gradient(log_probabilities, labels, factor)
    gradient = gradient.to(hidden.dtype)
    return loss, gradient @ weight, gradient.t() @ hidden


def cross_entropy_input_gradient(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    factor: torch.Tensor,
    logits_at_once: int = LOGITS_AT_ONCE,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Loss and the gradient of ``hidden``, block of frames by block of frames.

    Returns:
        ``(sum of losses [] float32, log normaliser [frames] float32, gradient of hidden [frames, hidden])``.
    """
    block = max(1, logits_at_once // weight.shape[0])
    loss = torch.zeros((), dtype=torch.float32, device=hidden.device)
    normaliser = torch.empty(hidden.shape[0], dtype=torch.float32, device=hidden.device)
    input_gradient = torch.empty_like(hidden)
    for start in range(0, hidden.shape[0], block):
        rows = slice(start, start + block)
        logits = F.linear(hidden[rows], weight).float()
        normaliser[rows] = logits.logsumexp(dim=-1)
        logits -= normaliser[rows].unsqueeze(-1)
        block_loss, gradient = _loss_and_logit_gradient(logits, labels[rows], factor)
        loss += block_loss
        input_gradient[rows] = gradient.to(hidden.dtype) @ weight
    return loss, normaliser, input_gradient


def cross_entropy_weight_gradient(
    hidden: torch.Tensor,
    normaliser: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    factor: torch.Tensor,
    logits_at_once: int = LOGITS_AT_ONCE,
) -> Iterator[tuple[int, int, torch.Tensor]]:
    """Yields the weight's gradient slice by slice of the vocabulary, each final.

    Args:
        hidden, weight, labels, factor: as in :func:`cross_entropy_direct`.
        normaliser: ``[frames]`` float32 from :func:`cross_entropy_input_gradient`.

    Yields:
        ``(first row, end row, gradient [end - first, hidden] in the compute dtype)``.
    """
    width = max(256, logits_at_once // max(1, hidden.shape[0]))
    supervised = (labels != IGNORE_INDEX).to(torch.float32) * factor
    for start in range(0, weight.shape[0], width):
        end = min(start + width, weight.shape[0])
        probabilities = F.linear(hidden, weight[start:end]).float()
        probabilities.sub_(normaliser.unsqueeze(-1)).exp_()
        inside = (labels >= start) & (labels < end)
        column = torch.where(inside, labels - start, 0).unsqueeze(-1)
        probabilities.scatter_add_(1, column, -inside.to(torch.float32).unsqueeze(-1))
        probabilities.mul_(supervised.unsqueeze(-1))
        yield start, end, probabilities.to(hidden.dtype).t() @ hidden


def cross_entropy_sum(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The sum of losses alone, for evaluation. Shapes as in :func:`cross_entropy_direct`."""
    block = max(1, LOGITS_AT_ONCE // weight.shape[0])
    loss = torch.zeros((), dtype=torch.float32, device=hidden.device)
    for start in range(0, hidden.shape[0], block):
        rows = slice(start, start + block)
        logits = F.linear(hidden[rows], weight).float()
        loss += F.cross_entropy(logits, labels[rows], ignore_index=IGNORE_INDEX, reduction="sum")
    return loss


def _loss_and_logit_gradient(
    log_probabilities: torch.Tensor, labels: torch.Tensor, factor: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Turns log probabilities ``[frames, classes]`` into ``(loss sum, gradient by the logits)``, in place."""
    present = labels != IGNORE_INDEX
    column = torch.where(present, labels, 0).unsqueeze(-1)
    picked = log_probabilities.gather(1, column).squeeze(-1)
    loss = -torch.where(present, picked, 0.0).sum()
    gradient = log_probabilities.exp_()
    gradient.scatter_add_(1, column, torch.full_like(gradient[:, :1], -1.0))
    return loss, gradient.mul_((present.to(torch.float32) * factor).unsqueeze(-1))
