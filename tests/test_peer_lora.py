"""The LoRA script that benchmarks/comparison.py sets beside the layer: simulated bytes against those of a real run."""

from __future__ import annotations

import functools
import sys
from pathlib import Path

import pytest
import torch
from tolerances import TOLERANCES

from moss_tts_patches.memory.full_ladder import Wanted, make_subject
from moss_tts_patches.memory.rungs import MicroBatch
from moss_tts_patches.memory.simulate import simulate_upstream
from moss_tts_patches.memory.tracker import StorageTracker

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))
from gpu_runs import build_model, real_batch
from peer_lora import adapt, adapt_simulated, checkpoint_without_hooks

pytestmark = pytest.mark.upstream

# Few, as in tests/test_gpu_script.py: without values transformers makes a mask, which would be large beside the rest.
BATCH = MicroBatch(1, 24, 14)
MODELS = {
    "local": ("moss_tts_local", "1.7b"),
    "delay": ("moss_tts_delay", "8b"),
    "v1.5": ("moss_tts_local_v1.5", "4b"),
    "realtime": ("moss_tts_realtime", "1.7b"),
}


@functools.cache
def subject_of(repository, model):
    subject = make_subject(Wanted(*MODELS[model], None, repository, BATCH, {}))
    return subject, subject.family.shrunken_config(subject.config)


def real_peak(subject, config):
    """Runs two optimizer steps of two micro-batches; returns the peak of the second step, and its gradients."""
    from accelerate.utils.operations import convert_to_fp32

    family, options = subject.family, subject.upstream
    forward = options.get("forward") or subject.model_class.forward
    with StorageTracker() as tracker:
        model = build_model(subject.model_class, config, torch.device("cpu"))
        adapt(family, model)
        checkpoint_without_hooks(options.get("enable_checkpointing"))(model)
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-5, foreach=False)
        inputs = real_batch(family, config, BATCH, torch.device("cpu"))
        for _ in range(2):
            optimizer.zero_grad()
            tracker.reset_peak()
            for _ in range(2):
                with family.simulated_precision(model):
                    output = forward(model, **inputs)
                output = convert_to_fp32(output)  # accelerate does, logits included, and the loop keeps them
                ((output if isinstance(output, torch.Tensor) else output.loss) * 0.5).backward()
            optimizer.step()
        return tracker.peak_bytes, {name: p.grad for name, p in model.named_parameters() if p.requires_grad}


def simulated_peak(subject, config, **changes):
    options = dict(subject.upstream)
    options["enable_checkpointing"] = checkpoint_without_hooks(options.get("enable_checkpointing"))
    arguments = (subject.family, subject.model_class, config, BATCH)
    return simulate_upstream(
        *arguments, **{"checkpointing": True, "shape_model": adapt_simulated, **options, **changes}
    )


@pytest.mark.parametrize("model", MODELS)
def test_a_real_step_of_the_script_takes_the_bytes_that_were_simulated(upstream_repo, torchaudio_stub, model):
    subject, config = subject_of(upstream_repo, model)
    peak, trained = real_peak(subject, config)
    simulated = simulated_peak(subject, config).peak_bytes
    print(f"{model}: real {peak}, simulated {simulated}, {simulated / peak - 1:+.2%}")
    assert simulated == pytest.approx(peak, rel=TOLERANCES["simulated_peak_relative"])
    # The script trains: frozen embeddings in front of checkpoints do not keep the gradient from any adapter.
    assert trained and all("lora_" in name and gradient is not None for name, gradient in trained.items())
    assert any(gradient.abs().max() > 0 for gradient in trained.values())


def test_without_the_adapters_the_bytes_are_others(upstream_repo, torchaudio_stub):
    """The control: full training has gradients and states of every weight."""
    subject, config = subject_of(upstream_repo, "local")
    peak, _ = real_peak(subject, config)
    assert simulated_peak(subject, config, shape_model=None).peak_bytes > 1.1 * peak


def test_checkpointing_alone_breaks_the_script_on_local(upstream_repo, torchaudio_stub):
    """What docs/benchmarks.md says of transformers 5; when this no longer fails, the hooks can stay."""
    subject, config = subject_of(upstream_repo, "local")
    with pytest.raises(RuntimeError, match="a leaf Variable that requires grad"):
        simulated_peak(subject, config, enable_checkpointing=lambda model: model.gradient_checkpointing_enable())
