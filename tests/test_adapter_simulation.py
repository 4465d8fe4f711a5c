"""What stands in for bitsandbytes' 4-bit layers in a simulation takes their bytes, at rest and at work."""

from __future__ import annotations

import pytest
import torch
from small_models import tiny_model
from torch import nn

from moss_tts_patches.adapters.plan import AdapterPlan
from moss_tts_patches.adapters.quantised_base import check_quantised, loading_options, quantised_modules
from moss_tts_patches.adapters.simulated import AdapterShape, FourBitStandIn
from moss_tts_patches.errors import SeamError
from moss_tts_patches.families.local import LocalFamily
from moss_tts_patches.memory.tracker import StorageTracker

bitsandbytes = pytest.importorskip("bitsandbytes")
OPTIONS = {"r": 4, "lora_alpha": 8, "lora_dropout": 0.0}


def real_layer(original):
    layer = bitsandbytes.nn.Linear4bit(
        original.in_features,
        original.out_features,
        bias=original.bias is not None,
        compute_dtype=original.weight.dtype,
        compress_statistics=True,
        quant_type="nf4",
    )
    layer.load_state_dict(original.state_dict())
    return layer.to("cpu")  # quantises


def bytes_of(tensors):
    return sum({id(t.untyped_storage()): t.untyped_storage().nbytes() for t in tensors}.values())


def stored(layer):
    if isinstance(layer, FourBitStandIn):
        return bytes_of([layer.weight, *layer.buffers()])
    state = layer.weight.quant_state
    tensors = [state.absmax, state.code, state.offset, state.state2.absmax, state.state2.code]
    return bytes_of([layer.weight, *tensors])


def kept_for_backward(layer, values):
    """Bytes that the forward keeps beside its input and the layer itself."""
    own = {id(t.untyped_storage()) for t in (values, layer.weight, *layer.buffers())}
    kept = []

    def keep(tensor):
        if id(tensor.untyped_storage()) not in own:
            kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        layer(values).sum()
    return bytes_of(kept)


@pytest.mark.parametrize(("rows", "columns"), [(128, 320), (640, 1024), (96, 64)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_stand_in_takes_the_bytes_of_the_real_layer(rows, columns, dtype):
    original = nn.Linear(columns, rows, bias=False, dtype=dtype)
    real, stand_in = real_layer(original), FourBitStandIn(original)
    assert isinstance(real.weight, bitsandbytes.nn.Params4bit) and real.weight.quant_state is not None
    assert stored(stand_in) == stored(real)
    assert stored(real) < original.weight.numel() * 0.6 + 2048
    values = torch.randn(7, columns, dtype=dtype, requires_grad=True)
    assert kept_for_backward(stand_in, values) == kept_for_backward(real, values) == 0


def test_at_work_it_unpacks_the_weight_and_needs_no_more_than_the_real_layer():
    original = nn.Linear(2048, 3072, bias=False, dtype=torch.bfloat16)
    peaks = {}
    for name, layer in (("real", real_layer(original)), ("stand-in", FourBitStandIn(original))):
        values = torch.randn(64, 2048, dtype=torch.bfloat16, requires_grad=True)
        with StorageTracker() as tracker:
            layer(values).sum().backward()
        peaks[name] = tracker.peak_bytes
    unpacked = original.weight.numel() * 2
    # A product without the unpacked weight would not be one. bitsandbytes' CPU code also unpacks through float32, its
    # CUDA kernel (which is what is simulated) does not: the real peak here is only an upper bound.
    assert unpacked < peaks["stand-in"] <= peaks["real"]


def test_a_simulated_model_has_adapters_and_4_bit_where_a_real_one_has():
    model, family = tiny_model(), LocalFamily()
    expected = quantised_modules(model, family.adapter_groups)
    assert len(expected) == 7 * 5
    AdapterShape(AdapterPlan("qlora", options=OPTIONS))(family, model)
    found = [name.removesuffix(".base_layer") for name, m in model.named_modules() if isinstance(m, FourBitStandIn)]
    assert found == expected
    trained = [p for p in model.parameters() if p.requires_grad]
    assert len(trained) == 2 * len(expected)
    assert {p.dtype for p in trained} == {torch.float32} and {p.device.type for p in trained} == {"cpu"}


def test_every_layer_outside_the_projections_is_named_to_be_left():
    model, family = tiny_model(), LocalFamily()
    quantised = quantised_modules(model, family.adapter_groups)
    options = loading_options(model, quantised, torch.bfloat16, torch.device("cpu"))
    left = options["quantization_config"].llm_int8_skip_modules
    linear = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    assert len(left) == len(linear) - len(quantised)
    assert any("lm_heads" in name for name in left) and any("mlps" in name for name in left)
    with pytest.raises(SeamError, match=r"quantised 0 layers, expected 35"):
        check_quantised(model, quantised)
