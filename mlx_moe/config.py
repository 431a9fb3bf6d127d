"""Frozen, validated model configuration.

Owns: reading a ``config.json`` in the shapes in which it is published, and refusing what cannot be run, with one line
that names the field and the allowed range, before anything is allocated. Must not know: arrays, files of weights, MLX.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MODEL_TYPES = ("qwen4_exp", "qwen4_exp_text")
LINEAR, FULL = "linear_attention", "full_attention"
_LAYER_TYPE = {LINEAR: LINEAR, FULL: FULL, "indexed_attention": FULL}  # newer transformers writes "indexed_attention"
_REQUIRED = object()
_MAX_NGRAM_ROWS = 1 << 30  # of one table; the published one has 320 million, and MLX counts to 2^31

# field: (lowest, highest, default). The upper ends are far above any published model and far below a hostile one.
_INTS: dict[str, tuple[int, int, Any]] = {
    "hidden_size": (1, 65536, _REQUIRED),
    "num_hidden_layers": (1, 1024, _REQUIRED),
    "vocab_size": (2, 1 << 22, _REQUIRED),
    "max_position_embeddings": (1, 1 << 24, 32768),
    "num_attention_heads": (1, 1024, _REQUIRED),
    "num_key_value_heads": (1, 1024, _REQUIRED),
    "head_dim": (2, 4096, _REQUIRED),
    "indexer_n_heads": (1, 256, _REQUIRED),
    "indexer_kv_heads": (1, 1, 1),
    "indexer_head_dim": (2, 4096, _REQUIRED),
    "indexer_budget": (1, 1 << 20, _REQUIRED),
    "indexer_compress_ratio": (1, 1024, _REQUIRED),
    "linear_num_key_heads": (1, 1024, _REQUIRED),
    "linear_num_value_heads": (1, 1024, _REQUIRED),
    "linear_key_head_dim": (1, 4096, _REQUIRED),
    "linear_value_head_dim": (1, 4096, _REQUIRED),
    "linear_conv_kernel_dim": (2, 64, 4),
    "num_experts": (1, 1024, _REQUIRED),
    "num_experts_per_tok": (1, 32, _REQUIRED),
    "moe_intermediate_size": (1, 65536, _REQUIRED),
    "shared_expert_intermediate_size": (1, 65536, _REQUIRED),
    "hc_count": (2, 64, 4),
    "hc_lowrank": (1, 65536, _REQUIRED),
    "ple_conv_kernel_size": (2, 64, 4),
    "ngram_size": (2, 8, 3),
    "heads_per_ngram": (1, 64, 8),
    "ngram_vocab_size_base": (2, 1 << 30, 20_000_000),
    "make_ngram_vocab_size_divisible_by": (1, 1 << 20, 128),
    "split_ngram_parts": (1, 1 << 16, 512),
    "seed": (0, (1 << 63) - 1, 1234),
}


class ConfigError(ValueError):
    """A configuration that cannot be run. The message is one line: the field, its value, what is allowed."""


@dataclass(frozen=True)
class ModelConfig:
    """The text model of one checkpoint. Attribute names are the keys of ``config.json``."""

    hidden_size: int
    num_hidden_layers: int
    vocab_size: int
    max_position_embeddings: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    indexer_n_heads: int
    indexer_kv_heads: int
    indexer_head_dim: int
    indexer_budget: int  # tokens
    indexer_compress_ratio: int  # tokens per block
    linear_num_key_heads: int
    linear_num_value_heads: int
    linear_key_head_dim: int
    linear_value_head_dim: int
    linear_conv_kernel_dim: int
    num_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    shared_expert_intermediate_size: int
    hc_count: int
    hc_lowrank: int
    ple_conv_kernel_size: int
    ngram_size: int
    heads_per_ngram: int
    ngram_vocab_size_base: int
    make_ngram_vocab_size_divisible_by: int
    split_ngram_parts: int
    seed: int
    ple_embed_dim: int
    ple_layer_ids: tuple[int, ...]  # one-based, ascending, as in the files
    layer_types: tuple[str, ...]  # LINEAR or FULL (which means QSA)
    eos_token_ids: tuple[int, ...]  # the first one cuts the n-gram window
    rms_norm_eps: float
    rope_theta: float
    rotary_dim: int
    norm_topk_prob: bool
    output_gate_type: str  # "sigmoid" or "silu"
    linear_value_heads_tiled: bool  # value head j uses key head j mod (key heads), as in GGUF files; else j // ratio
    quantization: Mapping[str, Any] | None  # MLX's own section, or None

    @property
    def num_blocks(self) -> int:
        """Complete key blocks that one query may attend to."""
        return self.indexer_budget // self.indexer_compress_ratio

    @property
    def conv_dim(self) -> int:
        """Channels of the Gated DeltaNet convolution: [q | k | v]."""
        return (
            2 * self.linear_num_key_heads * self.linear_key_head_dim
            + self.linear_num_value_heads * self.linear_value_head_dim
        )

    @property
    def ngram_heads(self) -> int:
        """Table rows read per token and PLE layer."""
        return (self.ngram_size - 1) * self.heads_per_ngram

    @property
    def ple_conv_span(self) -> int:
        """Positions of history that the dilated PLE convolution needs."""
        return (self.ple_conv_kernel_size - 1) * self.ngram_size

    def ple_index(self, layer: int) -> int | None:
        """Place of a (zero-based) layer among the PLE layers, or None."""
        return self.ple_layer_ids.index(layer + 1) if layer + 1 in self.ple_layer_ids else None

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> ModelConfig:
        """Build from the contents of a ``config.json``, nested (``text_config``) or flat.

        Raises ConfigError for another architecture and for any value that is out of range or of the wrong type.
        """
        text = _text_section(raw)
        values: dict[str, Any] = {name: _int(text, name, *spec) for name, spec in _INTS.items()}
        values["rms_norm_eps"] = _float(text, "rms_norm_eps", 1e-12, 1e-1, 1e-6)
        values["norm_topk_prob"] = _bool(text, "norm_topk_prob", True)
        values["eos_token_ids"] = _eos(raw, text, values["vocab_size"])
        values["layer_types"] = _layer_types(text, values["num_hidden_layers"])
        values["output_gate_type"] = _gate(text)
        values["linear_value_heads_tiled"] = _bool(text, "linear_value_heads_tiled", False)
        values["rope_theta"], values["rotary_dim"] = _rope(text, values["head_dim"])
        values["ple_layer_ids"] = _ple_layers(text, values)
        values["ple_embed_dim"] = _int(text, "ple_embed_dim", 1, 65536, values["hidden_size"])
        values["quantization"] = _quantization(raw)
        _refuse_unsupported(raw, text)
        config = cls(**values)
        _check_relations(config)
        return config

    @classmethod
    def from_path(cls, folder: str | Path) -> ModelConfig:
        """Read ``folder/config.json``. Raises ConfigError naming the file when it is missing or not JSON."""
        return cls.from_dict(read_config(folder))

    def replace(self, **changes: Any) -> ModelConfig:
        """A copy with some fields changed, checked again."""
        config = dataclasses.replace(self, **changes)
        _check_relations(config)
        return config


def read_config(folder: str | Path) -> dict[str, Any]:
    """The raw contents of ``folder/config.json``. Raises ConfigError when there is none or it is not a JSON object."""
    path = Path(folder) / "config.json"
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path}: not found; a model folder needs a config.json") from None
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: cannot be read as JSON ({error})") from None
    if not isinstance(raw, dict):
        raise ConfigError(f"{path}: holds a {type(raw).__name__}, not a JSON object")
    return raw


def _text_section(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    nested = raw.get("text_config")
    if nested is not None and not isinstance(nested, Mapping):
        raise ConfigError(f"text_config is a {type(nested).__name__}; allowed: an object")
    kind = raw.get("model_type", (nested or {}).get("model_type"))
    if kind not in MODEL_TYPES:
        raise ConfigError(f"model_type is {_show(kind)}; supported: {', '.join(MODEL_TYPES)}")
    text = raw if nested is None else nested
    inner = text.get("model_type", kind)
    if inner not in MODEL_TYPES:
        raise ConfigError(f"text_config.model_type is {_show(inner)}; supported: {', '.join(MODEL_TYPES)}")
    return text


def _show(value: Any) -> str:
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # a number of thousands of digits, or lists in lists in lists
        return f"a {type(value).__name__} too large to show"
    return text if len(text) <= 60 else text[:57] + "..."


def _int(source: Mapping[str, Any], name: str, low: int, high: int, default: Any = _REQUIRED) -> int:
    value = source.get(name)
    if value is None:
        if default is _REQUIRED:
            raise ConfigError(f"{name} is missing; needed: a whole number from {low} to {high}")
        return default
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise ConfigError(f"{name} is {_show(value)}; allowed: a whole number from {low} to {high}")
    return value


def _float(source: Mapping[str, Any], name: str, low: float, high: float, default: Any = _REQUIRED) -> float:
    value = source.get(name)
    if value is None:
        if default is _REQUIRED:
            raise ConfigError(f"{name} is missing; needed: a number from {low:g} to {high:g}")
        return default
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= high:
        raise ConfigError(f"{name} is {_show(value)}; allowed: a number from {low:g} to {high:g}")
    return float(value)


def _bool(source: Mapping[str, Any], name: str, default: bool) -> bool:
    value = source.get(name)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise ConfigError(f"{name} is {_show(value)}; allowed: true or false")
    return value


def _ids(value: Any, name: str, low: int, high: int) -> tuple[int, ...]:
    """A list of ids, or one id, as a tuple."""
    values = value if isinstance(value, (list, tuple)) else [value]
    for item in values:
        if isinstance(item, bool) or not isinstance(item, int) or not low <= item <= high:
            raise ConfigError(f"{name} is {_show(value)}; allowed: whole numbers from {low} to {high}")
    return tuple(values)


def _eos(raw: Mapping[str, Any], text: Mapping[str, Any], vocab: int) -> tuple[int, ...]:
    value = text.get("eos_token_id")
    value = raw.get("eos_token_id") if value is None else value
    return () if value is None else _ids(value, "eos_token_id", 0, vocab - 1)


def _layer_types(text: Mapping[str, Any], layers: int) -> tuple[str, ...]:
    value = text.get("layer_types")
    if value is None:
        every = _int(text, "full_attention_interval", 1, 1024, 4)
        return tuple(LINEAR if (i + 1) % every else FULL for i in range(layers))
    if not isinstance(value, (list, tuple)) or len(value) != layers:
        raise ConfigError(f"layer_types is {_show(value)}; allowed: a list of num_hidden_layers = {layers} names")
    for name in value:
        if not isinstance(name, str) or name not in _LAYER_TYPE:
            raise ConfigError(f"layer_types holds {_show(name)}; allowed: {', '.join(_LAYER_TYPE)}")
    return tuple(_LAYER_TYPE[name] for name in value)


def _gate(text: Mapping[str, Any]) -> str:
    value = text.get("output_gate_type") or text.get("hidden_act") or "silu"
    if value not in ("sigmoid", "silu"):
        raise ConfigError(f"output_gate_type is {_show(value)}; allowed: sigmoid or silu")
    return value


def _rope(text: Mapping[str, Any], head_dim: int) -> tuple[float, int]:
    """(theta, rotated dims) from ``rope_parameters``, or from the older flat keys."""
    rope = text.get("rope_parameters") or text.get("rope_scaling") or {}
    if not isinstance(rope, Mapping):
        raise ConfigError(f"rope_parameters is {_show(rope)}; allowed: an object")
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind != "default":
        raise ConfigError(f"rope_parameters.rope_type is {_show(kind)}; supported: default")
    merged = {**{k: text[k] for k in ("rope_theta", "partial_rotary_factor") if k in text}, **rope}
    theta = _float(merged, "rope_theta", 1.0, 1e12)
    part = _float(merged, "partial_rotary_factor", 0.0, 1.0, 1.0)
    dims = int(head_dim * part)
    if dims < 2 or dims % 2:
        raise ConfigError(f"partial_rotary_factor is {part:g}; head_dim times it must be an even number of 2 or more")
    return theta, dims


def _ple_layers(text: Mapping[str, Any], values: Mapping[str, Any]) -> tuple[int, ...]:
    value = text.get("ple_layer_ids")
    if value is None or value == []:
        return ()
    if not isinstance(value, (list, tuple)):
        raise ConfigError(f"ple_layer_ids is {_show(value)}; allowed: a list of one-based layer numbers")
    ids = tuple(sorted(set(_ids(value, "ple_layer_ids", 1, values["num_hidden_layers"]))))
    for layer in ids:
        if values["layer_types"][layer - 1] != LINEAR:
            raise ConfigError(f"ple_layer_ids names layer {layer}, which is {FULL}; allowed: {LINEAR} layers")
    if not values["eos_token_ids"]:
        raise ConfigError("eos_token_id is missing; ple_layer_ids needs it, since it cuts the n-gram window")
    return ids


def _quantization(raw: Mapping[str, Any]) -> Mapping[str, Any] | None:
    value = raw.get("quantization")
    if value is None:
        return None
    if not isinstance(value, Mapping):
        raise ConfigError(f"quantization is {_show(value)}; allowed: an object with group_size, bits and mode")
    for name, part in {"": value, **value}.items():
        if isinstance(part, Mapping) and part.get("mode", "affine") not in ("affine", "mxfp4", "mxfp8", "nvfp4"):
            where = f"quantization[{_show(name)}].mode" if name else "quantization.mode"
            raise ConfigError(f"{where} is {_show(part['mode'])}; allowed: affine, mxfp4, mxfp8, nvfp4")
    for name, low, high in (("bits", 1, 8), ("group_size", 16, 128)):
        _int({f"quantization.{name}": value.get(name)}, f"quantization.{name}", low, high)
    return dict(value)


def _refuse_unsupported(raw: Mapping[str, Any], text: Mapping[str, Any]) -> None:
    if _bool(text, "attention_bias", False):
        raise ConfigError("attention_bias is true; supported: false")
    if (text.get("hidden_act") or "silu") != "silu":
        raise ConfigError(f"hidden_act is {_show(text['hidden_act'])}; supported: silu")
    if _bool(text, "tie_word_embeddings", False) or _bool(raw, "tie_word_embeddings", False):
        raise ConfigError("tie_word_embeddings is true; supported: false")
    foreign = raw.get("quantization_config") or text.get("quantization_config")
    if foreign is None or raw.get("quantization") is not None:
        return
    if not isinstance(foreign, Mapping):
        raise ConfigError(f"quantization_config is {_show(foreign)}; allowed: an object with quant_method fp8")
    method = foreign.get("quant_method")
    if method != "fp8":
        raise ConfigError(f"quantization_config.quant_method is {_show(method)}; supported: fp8")
    block = foreign.get("weight_block_size", [128, 128])
    if block != [128, 128]:
        raise ConfigError(f"quantization_config.weight_block_size is {_show(block)}; supported: [128, 128]")


def _check_relations(c: ModelConfig) -> None:
    """Conditions between fields."""
    divides = (
        ("num_attention_heads", "num_key_value_heads"),
        ("linear_num_value_heads", "linear_num_key_heads"),
        ("indexer_budget", "indexer_compress_ratio"),
    )
    for whole, part in divides:
        if getattr(c, whole) % getattr(c, part):
            raise ConfigError(f"{whole} is {getattr(c, whole)}; allowed: a multiple of {part} = {getattr(c, part)}")
    if c.num_experts_per_tok > c.num_experts:
        raise ConfigError(
            f"num_experts_per_tok is {c.num_experts_per_tok}; allowed: 1 to num_experts = {c.num_experts}"
        )
    if c.rotary_dim > c.indexer_head_dim:
        raise ConfigError(
            f"indexer_head_dim is {c.indexer_head_dim}; allowed: at least the {c.rotary_dim} rotated dims of attention"
        )
    if c.ple_layer_ids and c.ple_embed_dim % c.ngram_heads:
        raise ConfigError(
            f"ple_embed_dim is {c.ple_embed_dim}; allowed: a multiple of (ngram_size - 1) * heads_per_ngram"
            f" = {c.ngram_heads}"
        )
    if c.ple_layer_ids and c.ngram_heads * c.ngram_vocab_size_base > _MAX_NGRAM_ROWS:
        raise ConfigError(
            f"ngram_vocab_size_base is {c.ngram_vocab_size_base}; allowed: up to {_MAX_NGRAM_ROWS // c.ngram_heads}"
            f" with {c.ngram_heads} heads"
        )
