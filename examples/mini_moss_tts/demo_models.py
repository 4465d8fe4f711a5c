"""Small random models of the four families, with upstream's weight names and shapes."""

from __future__ import annotations

import importlib
import sys
import types
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from .make_demo_data import Scale

ROOT = Path(__file__).resolve().parent
STANDARD_DEVIATION = 0.05  # wide enough for every gradient to stand clear of rounding at these widths

# Where each family keeps its model: folder, module and class, module and class of the config.
CLASSES = {
    "moss_tts_local": ("", "modeling_moss_tts", "MossTTSDelayModel", "configuration_moss_tts", "MossTTSDelayConfig"),
    "moss_tts_delay": ("", "modeling_moss_tts", "MossTTSDelayModel", "configuration_moss_tts", "MossTTSDelayConfig"),
    "moss_tts_local_v1.5": (
        "",
        "modeling_moss_tts",
        "MossTTSLocalModel",
        "configuration_moss_tts",
        "MossTTSLocalConfig",
    ),
    "moss_tts_realtime": (
        "mossttsrealtime",
        "modeling_mossttsrealtime",
        "MossTTSRealtime",
        "configuration_mossttsrealtime",
        "MossTTSRealtimeConfig",
    ),
}


def family_classes(family: str) -> tuple[Any, Any]:
    """Imports a family's model and config classes."""
    _, model_module, model_class, config_module, config_class = CLASSES[family]
    package = f"{_miniature()}.{family}"
    if family == "moss_tts_local_v1.5":  # a dot: no package that an import statement could name
        package = f"{_miniature()}.moss_tts_local_v1_5"
        if package not in sys.modules:
            shell = types.ModuleType(package)
            shell.__path__ = [str(ROOT / family)]
            sys.modules[package] = shell
    if CLASSES[family][0]:
        package += f".{CLASSES[family][0]}"
    model = getattr(importlib.import_module(f"{package}.{model_module}"), model_class)
    return model, getattr(importlib.import_module(f"{package}.{config_module}"), config_class)


def _miniature() -> str:
    """Makes the miniature importable as a package, under a name that no upstream checkout has."""
    if str(ROOT.parent) not in sys.path:
        sys.path.insert(0, str(ROOT.parent))
    return ROOT.name


def random_model(sizes: Scale, special_ids: dict[str, int], seed: int, family: str = "moss_tts_local") -> Any:
    """Builds the model; norm weights are moved off 1, so that a patch that drops one of them shows."""
    model_class, config_class = family_classes(family)
    config = config_class(**_FIELDS[family](sizes, special_ids), initializer_range=STANDARD_DEVIATION)
    _, model_module, model_name, config_module, config_name = CLASSES[family]
    if family != "moss_tts_realtime":  # its checkpoint carries a package that has to be imported by hand
        config.auto_map = {
            "AutoConfig": f"{config_module}.{config_name}",
            "AutoModel": f"{model_module}.{model_name}",
        }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = model_class(config)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim == 1:
                    parameter.add_(torch.randn(parameter.shape), alpha=0.05)
    return model


def _backbone(sizes: Scale, ids: dict[str, int]) -> dict[str, Any]:
    return {
        "vocab_size": sizes.vocabulary,
        "pad_token_id": ids["pad_token_id"],
        "max_position_embeddings": 4096,
        **_layers(sizes, sizes.layers),
    }


def _layers(sizes: Scale, layers: int) -> dict[str, Any]:
    """Sizes of a stack of Qwen3 layers that is as wide as the backbone."""
    return {
        "hidden_size": sizes.hidden,
        "intermediate_size": sizes.inner,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": sizes.head_width,
        "initializer_range": STANDARD_DEVIATION,
    }


def _delay_fields(sizes: Scale, ids: dict[str, int]) -> dict[str, Any]:
    return {
        "language_config": _backbone(sizes, ids),
        "n_vq": sizes.codebooks,
        "audio_vocab_size": sizes.codes,
        **ids,
    }


def _local_fields(sizes: Scale, ids: dict[str, int]) -> dict[str, Any]:
    return {
        **_delay_fields(sizes, ids),
        "local_hidden_size": sizes.depth_hidden,
        "local_ffn_hidden_size": sizes.depth_inner,
        "local_num_layers": 2,
        "additional_mlp_ffn_hidden_size": sizes.depth_hidden,
    }


def _v15_fields(sizes: Scale, ids: dict[str, int]) -> dict[str, Any]:
    fields = _delay_fields(sizes, ids)
    depth = {
        "vocab_size": sizes.vocabulary,
        "n_embd": sizes.hidden,
        "n_layer": 1,
        "n_head": 4,
        "n_inner": sizes.depth_inner,
        "activation_function": "silu",
        "layer_norm_epsilon": 1e-6,
        "position_embedding_type": "rope",
        "initializer_range": STANDARD_DEVIATION,
        **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
    }
    # Stored for the depth transformer, which does not follow the trainer's flag.
    attention = {"attn_implementation": "eager", "local_transformer_attn_implementation": "eager"}
    return {**fields, "qwen3_config": fields.pop("language_config"), "gpt2_config": depth, **attention}


def _realtime_fields(sizes: Scale, ids: dict[str, int]) -> dict[str, Any]:
    codes = {"rvq": sizes.codebooks, "audio_pad_token": sizes.codes, "audio_vocab_size": sizes.codes + 3}
    return {
        "language_config": _backbone(sizes, ids),
        "local_config": {**_layers(sizes, 2), **codes},
        **codes,
        "reference_audio_pad": ids["audio_user_slot_token_id"],
        "text_pad": ids["audio_assistant_gen_slot_token_id"],
    }


_FIELDS = {
    "moss_tts_local": _local_fields,
    "moss_tts_delay": _delay_fields,
    "moss_tts_local_v1.5": _v15_fields,
    "moss_tts_realtime": _realtime_fields,
}
