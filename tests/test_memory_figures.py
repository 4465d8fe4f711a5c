"""Full-size MOSS-TTS-Local, simulated: the figures that issues 2 and 3 ask for, upstream's from the same tool."""

from __future__ import annotations

import functools

import pytest
from upstream_runs import upstream_classes_fixture  # noqa: F401

from moss_tts_patches.families.local import LocalFamily
from moss_tts_patches.memory.simulate import MicroBatch, Rung, simulate_rung, simulate_upstream
from moss_tts_patches.units import GIB, TFLOP

pytestmark = pytest.mark.upstream

SHORT, LONG = MicroBatch(1, 600, 350), MicroBatch(1, 3000, 1750)

# Simulating 3000 positions takes a minute per schedule: only what an issue bounds is simulated.
BOUNDS = [
    # rung, batch, GiB, TFLOP of matrix products
    (Rung("fused"), SHORT, 17.0, 23.0),
    (Rung("staged"), SHORT, 17.0, 28.0),
    (Rung("staged", gradients="host"), SHORT, 12.6, 28.0),
    (Rung("fused", gradients="host"), SHORT, 14.6, 23.0),
    (Rung("fused", gradients="host", states="host"), SHORT, 9.4, 23.0),
    (Rung("staged", gradients="host", states="host"), SHORT, 7.0, 28.0),
    (Rung("staged", gradients="host", states="host"), LONG, 8.0, 140.0),
    # What an 8 GB card needs: 1.5 GiB go to the CUDA context, workspaces and the desktop.
    (Rung("staged", gradients="host", states="host", weights="host"), SHORT, 5.4, 28.0),
]
HOST_GIB = 16.5  # gradients in float32, states, the parked table
IDLE_WEIGHTS_GIB = 2.7  # the backbone's layers


@pytest.fixture(scope="module")
def simulated(upstream_classes):
    model_class, config_class = upstream_classes
    family = LocalFamily()
    config = family.full_size_config(config_class, "1.7b")

    @functools.cache
    def figures(rung, batch):
        if rung is None:
            return simulate_upstream(family, model_class, config, batch, checkpointing=True)
        return simulate_rung(family, model_class, config, batch, rung)

    return figures


@pytest.mark.parametrize(
    "rung,batch,gib,tflop",
    BOUNDS,
    ids=[
        f"{rung.schedule}-{rung.gradients}-{rung.states}-{rung.weights}-{batch.positions}" for rung, batch, *_ in BOUNDS
    ],
)
def test_peak_and_flops(simulated, rung, batch, gib, tflop):
    figures = simulated(rung, batch)
    print(f"{figures.peak_bytes / GIB:.2f} GiB {figures.host_bytes / GIB:.2f} GiB host", figures.matmul_flops / TFLOP)
    assert figures.peak_bytes <= gib * GIB
    assert figures.matmul_flops <= tflop * TFLOP
    assert figures.host_bytes <= (HOST_GIB + (IDLE_WEIGHTS_GIB if rung.weights == "host" else 0)) * GIB


def test_upstream_from_the_same_tool(simulated):
    """What the figures are beside: 22 GiB or more before the first long record, and 40.3 TFLOP."""
    short, long = simulated(None, SHORT), simulated(None, LONG)
    assert short.peak_bytes > 22 * GIB
    assert short.matmul_flops / TFLOP == pytest.approx(40.3, abs=0.1)
    assert long.peak_bytes - short.peak_bytes > 15 * GIB


def test_staged_hardly_grows_with_length(simulated):
    rung = Rung("staged", gradients="host", states="host")
    assert simulated(rung, LONG).peak_bytes - simulated(rung, SHORT).peak_bytes <= 1.2 * GIB
