"""Loss and gradients of every family, method, precision and schedule against upstream's own code on random models."""

from __future__ import annotations

import functools
from collections.abc import Callable

import fidelity
import pytest
import torch
from fidelity import Case, Upstream, allowed, is_close
from small_models import SCHEDULES, Ours

from moss_tts_patches.memory.upstream_source import SOURCES

pytestmark = pytest.mark.upstream


@pytest.fixture(scope="module", name="upstream_of")
def upstream_of_fixture(upstream_repo, torchaudio_stub) -> Callable[[str], Upstream]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(torchaudio_stub))
        yield functools.cache(lambda family: Upstream(upstream_repo, family))


@pytest.mark.parametrize("case", tuple(fidelity.cases()), ids=str)
def test_agreement(upstream_of, case):
    found = upstream_of(case.family).compare(case)
    assert is_close(case, found), (found, allowed(case))
    assert found.tensors > 20


class OneFrameLess(Ours):
    """Negative control: a layer that loses the last label of a record."""

    def loss(self, model, batch):
        labels = batch["labels"].clone()
        supervised = (labels[1] != -100).flatten(1).any(dim=1).nonzero().flatten()
        labels[1, supervised[-1]] = -100
        return super().loss(model, {**batch, "labels": labels})


@pytest.mark.parametrize("precision", fidelity.PRECISIONS)
@pytest.mark.parametrize("family", SOURCES)
def test_a_lost_frame_is_seen(upstream_of, family, precision):
    case, upstream = Case(family, "full", precision, "staged"), upstream_of(family)
    ours = OneFrameLess(case.schedule, fidelity.CHUNK_FRAMES, fidelity.LOGITS_AT_ONCE, family=upstream.family)
    assert not is_close(case, upstream.compare(case, ours))


class RoundedTwice(Ours):
    """Negative control: gradients of the right size with 2 bits of mantissa."""

    def train(self, model, batches, autocast=None):
        losses = super().train(model, batches, autocast)
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad = parameter.grad.to(torch.float8_e5m2).to(parameter.dtype)
        return losses


@pytest.mark.parametrize("precision", fidelity.PRECISIONS)
def test_coarser_gradients_behind_a_right_loss_are_seen(upstream_of, precision):
    case, upstream = Case("moss_tts_local", "full", precision, "fused"), upstream_of("moss_tts_local")
    ours = RoundedTwice(case.schedule, fidelity.CHUNK_FRAMES, fidelity.LOGITS_AT_ONCE, family=upstream.family)
    found = upstream.compare(case, ours)
    assert found.loss_difference <= allowed(case)[0]
    assert not is_close(case, found)


def test_every_schedule_and_family_is_in_the_table():
    found = {(case.family, case.schedule) for case in fidelity.cases()}
    assert found == {(family, schedule) for family in SOURCES for schedule in SCHEDULES}
