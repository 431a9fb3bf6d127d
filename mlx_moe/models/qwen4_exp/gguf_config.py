"""From the metadata of a GGUF file (architecture ``qwen4exp``) to the contents of a config.json.

Pure functions of the metadata and the tensors' shapes. Keys are llama.cpp's. What a file does not say but the published
model fixes is filled in here: softmax routing renormalised over the chosen experts, a sigmoid output gate.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_moe.config import FULL, LINEAR, ConfigError, ModelConfig

logger = logging.getLogger(__name__)

Metadata = Mapping[str, Any]
Shapes = Mapping[str, tuple[int, ...]]

ARCHITECTURE = "qwen4exp"
DEFAULT_RATIO = 4
_SOFTMAX = 1  # expert_gating_func
_FIELDS = {
    "hidden_size": "embedding_length",
    "max_position_embeddings": "context_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "indexer_n_heads": "attention.indexer.head_count",
    "indexer_head_dim": "attention.indexer.key_length",
    "indexer_budget": "attention.indexer.top_k",
    "linear_num_key_heads": "ssm.group_count",
    "linear_num_value_heads": "ssm.time_step_rank",
    "linear_key_head_dim": "ssm.state_size",
    "linear_conv_kernel_dim": "ssm.conv_kernel",
    "num_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
    "shared_expert_intermediate_size": "expert_shared_feed_forward_length",
    "hc_count": "hyper_connection.count",
    "hc_lowrank": "hyper_connection.low_rank",
}
_PLE_FIELDS = {
    "ngram_size": "ple.ngram_size",
    "heads_per_ngram": "ple.heads_per_ngram",
    "ple_conv_kernel_size": "ple.conv_kernel",
}
_HASHES = {
    "layer_multipliers": "ple.layer_multipliers",
    "ngram_heads_vocab_sizes": "ple.head_vocab_sizes",
    "ngram_heads_offsets": "ple.head_offsets",
}


def config_from_gguf(metadata: Metadata, shapes: Shapes) -> dict[str, Any]:
    """The contents of a flat config.json for ``ModelConfig.from_dict``.

    ``norm_convention`` and ``linear_value_heads_tiled`` say how the weights of such files are to be read: norm weights
    are the factors, and value head j belongs to key head j mod (key heads).

    Args:
        metadata: of the first shard.
        shapes: row-major shape of every tensor of all shards.

    Raises ConfigError, in one line that names the key, when the file is of another architecture or cannot be run.
    """
    found = metadata.get("general.architecture")
    if found != ARCHITECTURE:
        raise ConfigError(f"general.architecture is {_show(found)}; supported: {ARCHITECTURE}")
    _refuse_unsupported(metadata)
    layers = _layers(metadata, shapes)
    out: dict[str, Any] = {"model_type": "qwen4_exp", "num_hidden_layers": layers}
    out |= {field: _uniform(metadata, key) for field, key in _FIELDS.items()}
    out["vocab_size"] = _shape(shapes, "token_embd.weight", 2)[0]
    out["rms_norm_eps"] = _number(metadata, "attention.layer_norm_rms_epsilon")
    out["rope_parameters"] = _rope(metadata, out["head_dim"])
    out["linear_value_head_dim"] = _value_dim(metadata, out["linear_num_value_heads"])
    out["layer_types"] = _layer_types(metadata, layers)
    out["indexer_compress_ratio"] = _ratio(metadata, shapes, out["layer_types"])
    out["output_gate_type"] = "sigmoid"
    out["norm_topk_prob"] = bool(_get(metadata, "expert_weights_norm", True))
    out["eos_token_id"] = _eos(metadata)
    out |= _ple(metadata, shapes)
    out["norm_convention"] = "folded"
    out["linear_value_heads_tiled"] = True
    return out


def hash_constants(metadata: Metadata, config: ModelConfig) -> dict[str, mx.array]:
    """The n-gram hash constants of the file as int64 arrays, under the names that checkpoints have them.

    Files may hold more multipliers or heads than are used; those are left out.
    """
    if not config.ple_layer_ids:
        return {}
    base = f"model.layers.{config.ple_layer_ids[0] - 1}.ple.ple_embedding"
    counts = (config.ngram_size, config.ngram_heads, config.ngram_heads)
    out = {}
    for (name, key), count in zip(_HASHES.items(), counts, strict=True):
        values = _list(metadata, key)[:count]
        if not all(value < 1 << 63 for value in values):
            raise ConfigError(f"{ARCHITECTURE}.{key} holds {max(values)}; allowed: below 2^63")
        out[f"{base}.{name}"] = mx.array(np.array(values, dtype=np.int64))
    return out


def has_mtp(shapes: Shapes, layers: int) -> bool:
    """Whether the draft layer's tensors are among those of the file."""
    return f"blk.{layers}.nextn.eh_proj.weight" in shapes


def _refuse_unsupported(metadata: Metadata) -> None:
    gate = _get(metadata, "expert_gating_func", _SOFTMAX)
    if gate not in (0, _SOFTMAX):
        raise ConfigError(f"{ARCHITECTURE}.expert_gating_func is {_show(gate)}; supported: {_SOFTMAX} (softmax)")
    scale = _get(metadata, "expert_weights_scale", 1.0)
    if scale not in (0, 1):
        raise ConfigError(f"{ARCHITECTURE}.expert_weights_scale is {_show(scale)}; supported: 1")
    scaling = _get(metadata, "rope.scaling.type", "none")
    if scaling != "none" and _get(metadata, "rope.scaling.factor", 1.0) not in (0, 1):
        raise ConfigError(f"{ARCHITECTURE}.rope.scaling.type is {_show(scaling)}; supported: none")
    key, value = (_get(metadata, f"attention.{name}_length") for name in ("key", "value"))
    if value not in (None, key):
        raise ConfigError(f"{ARCHITECTURE}.attention.value_length is {_show(value)}; supported: the key length, {key}")


def _layers(metadata: Metadata, shapes: Shapes) -> int:
    """Layers without the draft layer, which ``block_count`` counts as well."""
    blocks = _whole(metadata, "block_count")
    drafts = _get(metadata, "nextn_predict_layers")
    if drafts is None:  # written by some converters only
        drafts = len({name.split(".")[1] for name in shapes if ".nextn." in name})
    if drafts not in (0, 1):
        raise ConfigError(f"{ARCHITECTURE}.nextn_predict_layers is {_show(drafts)}; supported: 0 and 1")
    return blocks - int(drafts)


def _rope(metadata: Metadata, head_dim: int) -> dict[str, Any]:
    dims = _whole(metadata, "rope.dimension_count")
    part = dims / head_dim if head_dim else 0.0
    if int(head_dim * part) < dims:  # rounded down: the product must give the dims again
        part = math.nextafter(part, 2)
    return {"rope_type": "default", "rope_theta": _number(metadata, "rope.freq_base"), "partial_rotary_factor": part}


def _value_dim(metadata: Metadata, heads: int) -> int:
    inner = _whole(metadata, "ssm.inner_size")
    if not heads or inner % heads:
        raise ConfigError(f"{ARCHITECTURE}.ssm.inner_size is {inner}; needed: a multiple of the {heads} value heads")
    return inner // heads


def _layer_types(metadata: Metadata, layers: int) -> list[str]:
    if _get(metadata, "attention.recurrent_layers") is None:
        every = max(_whole(metadata, "full_attention_interval"), 1)
        return [LINEAR if (i + 1) % every else FULL for i in range(min(layers, 1 << 16))]
    recurrent = _list(metadata, "attention.recurrent_layers", layers)
    return [LINEAR if linear else FULL for linear in recurrent[:layers]]


def _ratio(metadata: Metadata, shapes: Shapes, layer_types: list[str]) -> int:
    """Tokens per key block. Zeros everywhere are a converter's mistake: such a file would silently run dense."""
    key = "attention.compress_ratios"
    ratios = _list(metadata, key, len(layer_types), default=(0,) * len(layer_types))
    used = {ratio for kind, ratio in zip(layer_types, ratios, strict=False) if kind == FULL and ratio}
    if len(used) > 1:
        raise ConfigError(
            f"{ARCHITECTURE}.attention.compress_ratios differ by layer: {sorted(used)[:4]}; supported: one"
        )
    if not used and FULL in layer_types:
        if not any(".indexer." in name for name in shapes):
            raise ConfigError(
                f"{ARCHITECTURE}.attention.compress_ratios are all 0 and there is no indexer; supported: QSA"
            )
        logger.warning("attention.compress_ratios are all 0 although there are indexers; using %d", DEFAULT_RATIO)
    return used.pop() if used else DEFAULT_RATIO


def _eos(metadata: Metadata) -> list[int]:
    """The id that cuts the n-gram window first, then those that end a text."""
    ids = [_get(metadata, "ple.eos_token_id")]
    ids += [metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot")]
    return list(dict.fromkeys(value for value in ids if value is not None))


def _ple(metadata: Metadata, shapes: Shapes) -> dict[str, Any]:
    places = _list(metadata, "ple.layers", default=())
    if not places:
        return {"ple_layer_ids": []}
    if len(places) > 1:
        raise ConfigError(f"{ARCHITECTURE}.ple.layers is {_show(places)}; supported: one layer")
    out = {field: _whole(metadata, key) for field, key in _PLE_FIELDS.items()}
    heads = (out["ngram_size"] - 1) * out["heads_per_ngram"]
    sizes = _list(metadata, "ple.head_vocab_sizes", max(heads, 1))
    out["ple_layer_ids"] = [places[0] + 1]
    out["ple_embed_dim"] = heads * _whole(metadata, "embedding_length_per_layer_input")
    out["ngram_vocab_size_base"] = sizes[0]  # the first prime from the base on, so the same heads follow from it
    rows = _shape(shapes, "per_layer_token_embd.weight", 2)[0]
    out["make_ngram_vocab_size_divisible_by"] = _divisor(sum(sizes[:heads]), rows)
    return out


def _divisor(used: int, rows: int) -> int:
    """What the number of rows was rounded up to; 128 in published files."""
    for divisor in (128, *(1 << bits for bits in range(21))):
        if -(-used // divisor) * divisor == rows:
            return divisor
    raise ConfigError(
        f"per_layer_token_embd.weight has {rows} rows; needed: the {used} of ple.head_vocab_sizes, padded"
    )


def _shape(shapes: Shapes, name: str, dims: int) -> tuple[int, ...]:
    shape = shapes.get(name)
    if shape is None or len(shape) != dims:
        found = "missing" if shape is None else f"of shape {shape}"
        raise ConfigError(f"{name} is {found}; needed: a tensor of {dims} dimensions")
    return shape


def _get(metadata: Metadata, key: str, default: Any = None) -> Any:
    return metadata.get(f"{ARCHITECTURE}.{key}", default)


def _whole(metadata: Metadata, key: str) -> int:
    value = _get(metadata, key)
    if type(value) is not int or value < 0:
        raise ConfigError(f"{ARCHITECTURE}.{key} is {_show(value)}; needed: a whole number")
    return value


def _number(metadata: Metadata, key: str) -> float:
    """A float32 of the file as the decimal number that it was written from."""
    value = _get(metadata, key)
    if type(value) not in (int, float):
        raise ConfigError(f"{ARCHITECTURE}.{key} is {_show(value)}; needed: a number")
    return float(f"{value:.7g}")


def _uniform(metadata: Metadata, key: str) -> int:
    """A whole number, or an array by layer whose entries other than 0 are equal."""
    value = _get(metadata, key)
    if isinstance(value, tuple):
        used = {entry for entry in _list(metadata, key) if entry}
        if len(used) != 1:
            raise ConfigError(f"{ARCHITECTURE}.{key} differs by layer: {sorted(used)[:4]}; supported: one value")
        return used.pop()
    return _whole(metadata, key)


def _list(metadata: Metadata, key: str, least: int = 0, default: tuple[int, ...] | None = None) -> tuple[int, ...]:
    """At least ``least`` whole numbers or bools."""
    value = _get(metadata, key, default)
    if not isinstance(value, tuple) or not all(isinstance(entry, int) and entry >= 0 for entry in value):
        raise ConfigError(f"{ARCHITECTURE}.{key} is {_show(value)}; needed: whole numbers")
    if len(value) < least:
        raise ConfigError(f"{ARCHITECTURE}.{key} has {len(value)} entries; needed: {least}")
    return value


def _show(value: Any) -> str:
    text = repr(value[:8] if isinstance(value, (str, tuple)) and len(value) > 64 else value)
    return text if len(text) <= 80 else text[:77] + "..."
