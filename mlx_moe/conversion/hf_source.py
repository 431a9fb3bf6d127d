"""A Hugging Face folder as the source of a conversion: BF16, F16, F32 or FP8, experts fused, per expert or stacked.

Only headers, norms and small weights are read here; everything else is read by rows where it lies.
"""

from __future__ import annotations

import logging
import math
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from custom_kernels.ggml_blocks import format_by_name
from mlx_moe.config import ConfigError, ModelConfig, read_config
from mlx_moe.conversion.source import Dense, LayerSource, Source, check_complete, check_hashes, check_table
from mlx_moe.conversion.stored import FP8, Stored
from mlx_moe.conversion.tokenizer_files import copy_tokenizer
from mlx_moe.formats.checkpoint import weight_files
from mlx_moe.formats.safetensors import FileFormatError, TensorInfo, read_header
from mlx_moe.models.qwen4_exp import sanitize as names
from mlx_moe.models.qwen4_exp.gguf_names import Packed

logger = logging.getLogger(__name__)

_FORMATS = {"F32": "F32", "F16": "F16", "BF16": "BF16", "F8_E4M3": FP8}
_SCALE = re.compile(r"(\.weight)?(\.weight_scale|_scale)(_inv)?$")
_EXPERT = re.compile(r"\.mlp\.experts\.(\d{1,4})\.(gate|up|down)_proj(?=\.weight$)")
_FUSED = re.compile(r"\.mlp\.experts\.(gate_up|down)_proj(?=(\.weight)?$)")
_STACKED = re.compile(r"\.mlp\.switch_mlp\.(gate|up|down)_proj(?=\.weight$)")
_TABLE = re.compile(r"\.ngram_embedding(?:\.shard_(\d{1,5}))?\.weight$")
_HASHES = (".layer_multipliers", ".ngram_heads_vocab_sizes", ".ngram_heads_offsets")

Matrices = dict[int, Stored]
"""By expert."""


@dataclass
class _Found:
    """What the files hold, sorted by use. Experts by layer and part, tables by their name, dense by canonical name."""

    experts: dict[str, dict[str, Matrices]] = field(default_factory=lambda: defaultdict(lambda: defaultdict(dict)))
    tables: dict[str, dict[int, Stored]] = field(default_factory=lambda: defaultdict(dict))
    dense: dict[str, tuple[Path, str, TensorInfo]] = field(default_factory=dict)
    hashes: dict[str, tuple[str, Path, TensorInfo]] = field(default_factory=dict)
    scales: dict[str, Stored] = field(default_factory=dict)
    vision: int = 0

    @property
    def has_mtp(self) -> bool:
        """Whether the draft layer is there."""
        return any(name.startswith("mtp.") for name in self.dense)


@dataclass(frozen=True)
class Streamed:
    """What of a folder need not be in memory: experts, the draft layer's last, and the n-gram table in parts."""

    layers: tuple[LayerSource, ...]
    table: tuple[Stored, ...] | None


def open_hf_source(path: Path, norm_convention: str = "auto") -> Source:
    """See ``source.open_source``."""
    raw = read_config(path)
    if "pack" in raw:
        raise FileFormatError(f"{path}: is a pack already; convert the model that it was made from")
    config = ModelConfig.from_dict(raw)
    files = weight_files(path)
    found = _sort(files)
    if found.vision:
        logger.warning("%s: %d tensors of the image encoder are left out; text only", path, found.vision)
    convention, norms = _norms(
        found, raw.get("norm_convention", "auto") if norm_convention == "auto" else norm_convention
    )
    dense = tuple(_dense(name, *entry, norms, found.scales) for name, entry in found.dense.items())
    check_complete(path, config, dense, found.has_mtp)
    check_hashes(path, config, {name: _whole_numbers(*entry) for name, entry in found.hashes.items()})
    return Source(
        kind="Hugging Face",
        path=path,
        files=tuple(files),
        raw=_clean(raw),
        config=config,
        norm_convention=convention,
        layers=_layers(path, config, found),
        dense=dense,
        table=_table(path, config, found),
        place=None,
        save_tokenizer=partial(copy_tokenizer, path),
    )


def find_streamed(path: Path, config: ModelConfig) -> Streamed:
    """Experts and n-gram table of a folder, from headers alone.

    Raises FileFormatError or ConfigError, in one line, when one is missing or of another shape.
    """
    found = _sort(weight_files(path))
    return Streamed(_layers(path, config, found), _table(path, config, found))


def _clean(raw: dict[str, Any]) -> dict[str, Any]:
    """config.json without what it says of the files' packing."""
    out = {key: value for key, value in raw.items() if key not in ("quantization", "quantization_config")}
    if isinstance(out.get("text_config"), Mapping):
        text = out["text_config"]
        out["text_config"] = {key: value for key, value in text.items() if key != "quantization_config"}
    return {**out, "norm_convention": "folded"}


def _sort(files: Sequence[Path]) -> _Found:
    """Every tensor of every file to its use. Raises when a name stands twice or cannot be read here."""
    found, seen = _Found(), {}
    for path in files:
        tensors, _ = read_header(path)
        for name, info in tensors.items():
            if name in seen:
                raise FileFormatError(f"{path}: tensor {name[:120]!r} is also in {seen[name].name}")
            seen[name] = path
            if names.is_vision(name):
                found.vision += 1
            else:
                _take(found, path, name, info)
    return found


def _take(found: _Found, path: Path, name: str, info: TensorInfo) -> None:
    where = f"{path}: tensor {name[:120]!r}"
    if name.endswith((".scales", ".biases")):
        raise FileFormatError(f"{where}: is packed by mx.quantize; convert the model that it was made from")
    if name.endswith(_HASHES):
        found.hashes[names.canonical_name(name)] = (where, path, info)
    elif _SCALE.search(name):
        found.scales[_scale_key(where, name)] = _scale(where, path, info)
    elif match := _EXPERT.search(name):
        layer = _layer_of(name)
        _add(where, found.experts[layer][match[2]], int(match[1]), _matrix(where, path, info, 2))
    elif match := _FUSED.search(name) or _STACKED.search(name):
        _take_all(where, found.experts[_layer_of(name)], match[1], _matrix(where, path, info, 3), info.shape[0])
    elif match := _TABLE.search(name):
        table = _matrix(where, path, info, 2)
        _add(where, found.tables[names.canonical_name(name)], int(match[1] or 0), table)
    else:
        if (canonical := names.canonical_name(name)) in found.dense:
            raise ConfigError(f"{where}: {canonical} is in the checkpoint twice")
        found.dense[canonical] = (path, name, info)


def _layer_of(name: str) -> str:
    """``model.layers.N`` or ``mtp.layers.0`` of an expert's tensor."""
    return names.canonical_name(name).split(".mlp.")[0]


def _add(where: str, target: dict[int, Stored], key: int, value: Stored) -> None:
    if key in target:
        raise ConfigError(f"{where}: number {key} is in the checkpoint twice, under two names or in two layouts")
    target[key] = value


def _matrix(where: str, path: Path, info: TensorInfo, dims: int) -> Stored:
    """The rows of a tensor of ``dims`` axes, all axes but the last taken together."""
    if info.dtype not in _FORMATS or len(info.shape) != dims or 0 in info.shape:
        found = f"{info.dtype} {list(info.shape)}"
        raise FileFormatError(f"{where}: {found}; needed: {dims} axes of {', '.join(_FORMATS)}")
    *lead, columns = info.shape
    rows = lead[0] if dims == 2 else lead[0] * lead[1]
    return Stored(path, info.start, (rows, columns), _FORMATS[info.dtype])


def _scale(where: str, path: Path, info: TensorInfo) -> Stored:
    if info.dtype not in ("F32", "F16", "BF16") or len(info.shape) > 2 or 0 in info.shape:
        raise FileFormatError(f"{where}: scales are {info.dtype} {list(info.shape)}; needed: numbers of up to two axes")
    shape = (1, *info.shape)[-2:] if info.shape else (1, 1)
    return Stored(path, info.start, shape, info.dtype)


def _take_all(where: str, layer: dict[str, Matrices], part: str, whole: Stored, experts: int) -> None:
    """A matrix per expert, or two of gate_up, out of a tensor of all experts."""
    if whole.format == FP8:
        raise FileFormatError(f"{where}: is FP8 of all experts in one; supported: FP8 per expert")
    rows = whole.shape[0] // experts
    kinds = ("gate", "up") if part == "gate_up" else (part,)
    if rows % len(kinds):
        raise FileFormatError(f"{where}: its {rows} rows are not gate and up; of another model")
    for e in range(experts):
        for i, kind in enumerate(kinds):
            first = e * rows + i * rows // len(kinds)
            at = whole.offset + first * whole.row_bytes
            shape = (rows // len(kinds), whole.shape[1])
            _add(where, layer[kind], e, replace(whole, offset=at, shape=shape))


def _layers(path: Path, config: ModelConfig, found: _Found) -> tuple[LayerSource, ...]:
    """Experts of every layer, the draft layer's last."""
    layers = [f"model.layers.{i}" for i in range(config.num_hidden_layers)] + ["mtp.layers.0"] * found.has_mtp
    return tuple(_layer(path, config, found, name) for name in layers)


def _layer(path: Path, config: ModelConfig, found: _Found, name: str) -> LayerSource:
    hidden, width = config.hidden_size, config.moe_intermediate_size
    shapes = {"gate": (width, hidden), "up": (width, hidden), "down": (hidden, width)}
    return LayerSource(name, *(_part(path, config, found, (name, part), shape) for part, shape in shapes.items()))


def _part(path: Path, config: ModelConfig, found: _Found, key: tuple[str, str], shape: tuple[int, int]) -> list[Stored]:
    """One matrix of each expert of a layer, all of one shape and format."""
    layer, part = key
    matrices = found.experts.get(layer, {}).get(part, {})
    where = f"{path}: {layer}.mlp.experts: {part}_proj of expert"
    if odd := set(range(config.num_experts)) ^ matrices.keys():
        what = "is missing" if min(odd) < config.num_experts else "is one too many"
        raise ConfigError(f"{where} {min(odd)} {what}; num_experts is {config.num_experts}")
    experts = [matrices[e] for e in range(config.num_experts)]
    for e, matrix in enumerate(experts):
        if matrix.shape != shape or matrix.format != experts[0].format:
            got, want = f"{matrix.format} {matrix.shape}", f"{experts[0].format} {shape}"
            raise ConfigError(f"{where} {e} is {got}, needed {want} ({matrix.file.name})")
    return [
        _scaled(f"{where} {e}", matrix, found.scales.get(f"{layer}.{part}.{e}")) for e, matrix in enumerate(experts)
    ]


def _scale_key(where: str, name: str) -> str:
    """What a scale belongs to: an expert's matrix, a table or a dense weight."""
    weight = _SCALE.sub(".weight", name)
    if match := _EXPERT.search(weight):
        return f"{_layer_of(weight)}.{match[2]}.{match[1]}"
    if (match := _TABLE.search(weight)) and match[1]:
        raise FileFormatError(f"{where}: scales of single shards are not supported; needed: one for the table")
    return names.canonical_name(weight)


def _scaled(where: str, matrix: Stored, scale: Stored | None) -> Stored:
    """An FP8 matrix with its scales; others as they are."""
    if matrix.format != FP8:
        return matrix
    blocks = tuple(-(-n // names.FP8_BLOCK) for n in matrix.shape)
    if scale is None or scale.shape not in (blocks, (1, 1)):
        found = "missing" if scale is None else f"of shape {scale.shape}"
        raise ConfigError(f"{where}: its FP8 scales are {found}; needed: {blocks}, or one for all")
    return replace(matrix, scale=scale)


def _table(path: Path, config: ModelConfig, found: _Found) -> tuple[Stored, ...] | None:
    """The parts of the n-gram table in the order of their numbers."""
    if not config.ple_layer_ids:
        return None
    name = f"model.layers.{config.ple_layer_ids[0] - 1}.ple.ple_embedding.ngram_embedding.weight"
    shards = found.tables.get(name, {})
    if not shards or shards.keys() != set(range(len(shards))):
        raise ConfigError(f"{path}: {name}: shard {min(set(range(len(shards) + 1)) - shards.keys())} is missing")
    parts = tuple(shards[i] for i in range(len(shards)))
    if len({(part.shape[1], part.format) for part in parts}) > 1:
        raise ConfigError(f"{path}: {name}: shards differ in width or type")
    check_table(path, config, parts)
    return tuple(_scaled(f"{path}: {name}", part, found.scales.get(name)) for part in parts)


def _norms(found: _Found, convention: str) -> tuple[str, dict[str, mx.array]]:
    """Which convention the file follows, and every norm weight as the factor, float32."""
    entries = {name: entry for name, entry in found.dense.items() if names.is_norm(name)}
    tensors = {name: _small(*entry).astype(mx.float32) for name, entry in entries.items()}
    if convention == "auto":
        convention = names.detect_norm_convention(tensors)
    return convention, names.fold_norms(tensors, convention)


def _dense(
    name: str, path: Path, raw: str, info: TensorInfo, norms: Mapping[str, mx.array], scales: Mapping[str, Stored]
) -> Dense:
    """Matrices are read by rows, others whole."""
    where = f"{path}: tensor {raw[:120]!r}"
    if name in norms:
        return _ready(name, norms[name])
    if len(info.shape) == 2:
        return Dense.of(name, _scaled(where, _matrix(where, path, info, 2), scales.get(name)))
    small = _small(path, raw, info)
    if name.endswith("conv1d.weight") and small.ndim == 3:
        small = small.squeeze(1) if small.shape[1] == 1 else small.squeeze(-1) if small.shape[2] == 1 else small
    return _ready(name, small)


def _small(path: Path, name: str, info: TensorInfo) -> mx.array:
    """A tensor of any number of axes, read now."""
    if info.dtype not in ("F32", "F16", "BF16"):
        raise FileFormatError(f"{path}: tensor {name[:120]!r}: {info.dtype} {list(info.shape)}; needed: numbers")
    return Stored(path, info.start, (1, math.prod(info.shape)), info.dtype).numbers(0, 1).reshape(info.shape)


def _whole_numbers(where: str, path: Path, info: TensorInfo) -> mx.array:
    """An I64 tensor of one axis."""
    if info.dtype != "I64" or len(info.shape) != 1 or info.shape[0] > 4096:
        raise FileFormatError(f"{where}: {info.dtype} {list(info.shape)}; needed: I64 of one axis")
    with path.open("rb") as file:
        file.seek(info.start)
        return mx.array(np.frombuffer(file.read(info.stop - info.start), dtype="<i8"))


def _ready(name: str, array: mx.array) -> Dense:
    """A small weight that is in memory."""
    format = format_by_name({mx.float32: "F32", mx.float16: "F16", mx.bfloat16: "BF16"}[array.dtype])
    return Dense(
        name, tuple(array.shape), format.name, array.nbytes, lambda start, stop: Packed(array[start:stop], format)
    )


def norm_convention(tensors: Mapping[str, tuple[Path, TensorInfo]], known: str = "auto") -> str:
    """ "raw" or "folded", from the norm weights of a folder by their names in the files. ``known`` is config.json's."""
    norms = {
        canonical: _small(path, name, info).astype(mx.float32)
        for name, (path, info) in tensors.items()
        if names.is_norm(canonical := names.canonical_name(name))
    }
    return names.detect_norm_convention(norms) if known == "auto" else known
