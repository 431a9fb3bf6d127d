"""What a model's files hold and what running them costs: types, sizes, what stays in memory, what a token reads.

Reads headers and norm weights only. Knows no terminal; ``cli/info.py`` prints.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from mlx_moe.config import LINEAR, ModelConfig, read_config
from mlx_moe.conversion.choices import Choices
from mlx_moe.conversion.hf_source import norm_convention
from mlx_moe.conversion.plan import make_plan, record_layout
from mlx_moe.conversion.source import open_source
from mlx_moe.formats.checkpoint import weight_files
from mlx_moe.formats.gguf import open_gguf
from mlx_moe.formats.gguf_model import expert_index, model_config, row_index
from mlx_moe.formats.pack import Pack, is_pack, open_pack
from mlx_moe.formats.safetensors import FileFormatError, TensorInfo, read_header
from mlx_moe.hf_index import NotInPlace, folder_index
from mlx_moe.models.qwen4_exp.gguf_names import is_streamed, recipes
from mlx_moe.models.qwen4_exp.sanitize import canonical_name, is_vision
from mlx_moe.paging.index import ExpertIndex, RowIndex

WIDE = ("F32", "F16", "BF16", "F8_E4M3")
"""Types of experts that are worth converting."""
_EMBEDDING = "model.embed_tokens."
_REMEDY = "make a pack of the model that they were made from with 'mlx-moe convert'"


@dataclass(frozen=True)
class Experts:
    """One layer's experts.

    Attributes:
        gate, up, down: their types.
        record_bytes: of one expert in its files, scales included.
        slot_bytes: of one expert in memory, gaps between its parts included; 0 where experts do not stream.
    """

    gate: str
    up: str
    down: str
    record_bytes: int
    slot_bytes: int = 0


@dataclass(frozen=True)
class Table:
    """The n-gram table. ``place`` is the file that holds it; ``rows`` of ``row_bytes`` each."""

    format: str
    rows: int
    row_bytes: int
    place: str

    @property
    def nbytes(self) -> int:
        """Of the whole table."""
        return self.rows * self.row_bytes


@dataclass(frozen=True)
class Description:
    """A model's files.

    Attributes:
        kind: "pack", "GGUF", "Hugging Face" or "MLX".
        norm_convention: "raw" or "folded", as the files have it; None where only headers were looked at.
        experts: by layer name, the draft layer last.
        dense: (type, bytes) by canonical name or by the file's.
        in_memory: why experts and n-gram table cannot be read in place, in one line; None where they can.
        problem: what keeps the files from being used, in one line.
        converted: what ``mlx-moe convert`` would make of wide experts with its defaults.
    """

    kind: str
    path: Path
    files: tuple[Path, ...]
    config: ModelConfig
    norm_convention: str | None
    tiled: bool
    experts: Mapping[str, Experts]
    dense: Mapping[str, tuple[str, int]]
    table: Table | None
    in_memory: str | None = None
    problem: str | None = None
    converted: Mapping[str, Any] = field(default_factory=dict)

    @property
    def has_mtp(self) -> bool:
        """Whether the draft layer is there."""
        return len(self.experts) > self.config.num_hidden_layers

    @property
    def dense_bytes(self) -> int:
        """What stays in memory: everything but experts and n-gram rows."""
        return sum(size for _, size in self.dense.values())

    @property
    def dense_types(self) -> dict[str, int]:
        """Bytes by type, the largest first."""
        out: Counter[str] = Counter()
        for kind, size in self.dense.values():
            out[kind] += size
        return dict(out.most_common())

    @property
    def expert_bytes(self) -> int:
        """Of all experts, the draft layer's too."""
        return self.config.num_experts * sum(layer.record_bytes for layer in self.experts.values())

    @property
    def token_bytes(self) -> dict[str, int]:
        """What one token reads when nothing is cached: dense from memory, the rest from disk; no draft layer."""
        layers = list(self.experts.values())[: self.config.num_hidden_layers]
        skipped = [size for name, (_, size) in self.dense.items() if name.startswith(("mtp.", _EMBEDDING))]
        return {
            "dense": self.dense_bytes - sum(skipped),
            "experts": self.config.num_experts_per_tok * sum(layer.record_bytes for layer in layers),
            "rows": self.config.ngram_heads * self.table.row_bytes if self.table else 0,
        }

    @property
    def groups(self) -> list[tuple[str, Experts, int]]:
        """Layers of the same types: their numbers as text, the types, and how many there are."""
        same: dict[Experts, list[int]] = defaultdict(list)
        for i, layer in enumerate(self.experts.values()):
            same[layer].append(i)
        return [
            (_ranges(numbers, self.config.num_hidden_layers), layer, len(numbers)) for layer, numbers in same.items()
        ]

    @property
    def linear_layers(self) -> int:
        """Layers with Gated DeltaNet; the others have sparse attention."""
        return self.config.layer_types.count(LINEAR)

    def to_json(self) -> dict[str, Any]:
        """Everything, in plain types; sizes in bytes."""
        config, table = self.config, self.table
        return {
            "kind": self.kind,
            "path": str(self.path),
            "files": [str(path) for path in self.files],
            "layers": config.num_hidden_layers,
            "linear_attention_layers": self.linear_layers,
            "draft_layer": self.has_mtp,
            "experts_per_layer": config.num_experts,
            "experts_per_token": config.num_experts_per_tok,
            "norm_convention": self.norm_convention,
            "value_heads_tiled": self.tiled,
            "experts": [
                {"layers": numbers, "gate": e.gate, "up": e.up, "down": e.down, "record_bytes": e.record_bytes}
                for numbers, e, _ in self.groups
            ],
            "expert_bytes": self.expert_bytes,
            "dense_types": self.dense_types,
            "dense_bytes": self.dense_bytes,
            "ngram": table and {"format": table.format, "rows": table.rows, "bytes": table.nbytes, "file": table.place},
            "cold_token_bytes": self.token_bytes,
            "in_memory": self.in_memory,
            "problem": self.problem,
            "converted": dict(self.converted) or None,
        }


def describe(path: str | Path, headers_only: bool = False) -> Description:
    """Look at a pack, a GGUF file or folder, or a folder of safetensors.

    headers_only: read no weight, so that the convention of norms and what a conversion would make stay unknown.

    Raises FileNotFoundError, FileFormatError or ConfigError, in one line, when it is none of these.
    """
    path = Path(path).expanduser()
    if not path.exists():
        raise FileNotFoundError(f"{path}: no such file or folder; for a Hub repository, download it first")
    if path.is_dir() and is_pack(path):
        return _of_pack(open_pack(path))
    if path.is_dir() and (path / "config.json").exists() and not any(path.glob("*.gguf")):
        return _of_folder(path, headers_only)
    return _of_gguf(path)


def _of_pack(pack: Pack) -> Description:
    problem = None
    try:
        table = _table(pack.rows)
    except FileFormatError as error:
        problem, reference = str(error), pack.reference
        table = Table(reference.format, reference.rows, reference.bytes // reference.rows, reference.file)
    return Description(
        kind="pack",
        path=pack.folder,
        files=tuple(file.path for file in pack.files),
        config=pack.config,
        norm_convention="folded",
        tiled=bool(pack.raw.get("linear_value_heads_tiled", False)),
        experts=_experts(pack.experts, pack.config),
        dense=_dense_types(pack.dense_tensors, {name: form.name for name, form in pack.blocks.items()}, pack.config),
        table=table,
        problem=problem,
    )


def _of_gguf(path: Path) -> Description:
    file = open_gguf(path)
    raw = model_config(file)
    config = ModelConfig.from_dict(raw)
    dense = {}
    for weight, recipe in recipes(file.tensors, config).items():
        if not is_streamed(weight):
            places = [file.place(source) for source in recipe.sources]
            share = 2 if recipe.step in ("left", "right") else 1
            dense[weight] = (places[0].format.name, sum(place.size for place in places) // share)
    return Description(
        kind="GGUF",
        path=path,
        files=file.paths,
        config=config,
        norm_convention="folded",
        tiled=True,
        experts=_experts(expert_index(file, config), config),
        dense=dense,
        table=_table(row_index(file, config)),
    )


def _of_folder(path: Path, headers_only: bool) -> Description:
    raw = read_config(path)
    config = ModelConfig.from_dict(raw)
    files = weight_files(path)
    tensors = {
        name: (file, info) for file in files for name, info in read_header(file)[0].items() if not is_vision(name)
    }
    dense = {
        canonical_name(name): info
        for name, (_, info) in tensors.items()
        if not is_streamed(canonical_name(name)) and info.dtype != "I64"  # constants of the n-gram hash
    }
    experts, in_memory = _in_place(path, config)
    found = Description(
        kind="Hugging Face" if config.quantization is None else "MLX",
        path=path,
        files=tuple(files),
        config=config,
        norm_convention=None if headers_only else norm_convention(tensors, raw.get("norm_convention", "auto")),
        tiled=bool(raw.get("linear_value_heads_tiled", False)),
        experts=experts or _folder_experts(tensors, config),
        dense=_dense_types(dense, {}, config),
        table=_folder_table(tensors, config),
        in_memory=in_memory,
    )
    wide = any(kind in WIDE for layer in found.experts.values() for kind in (layer.gate, layer.up, layer.down))
    return replace(found, converted=_converted(path)) if wide and not headers_only else found


def _in_place(path: Path, config: ModelConfig) -> tuple[dict[str, Experts], str | None]:
    """Experts as they are read in place; nothing, and the reason, where they cannot be."""
    if config.quantization is not None:
        return {}, f"experts packed by mx.quantize do not stream; {_REMEDY}"
    try:
        return _experts(folder_index(path, config).experts, config), None
    except NotInPlace as error:
        return {}, str(error)


def _converted(path: Path) -> dict[str, Any]:
    """Sizes of the pack that convert's defaults make."""
    plan = make_plan(open_source(path), Choices())
    kinds = [form.name if form else "as they are" for form in (plan.targets.gate_up, plan.targets.down)]
    layers = plan.source.layers[: plan.source.config.num_hidden_layers]
    records = (record_layout(plan.source, plan.targets, layer) for layer in layers)
    token = plan.source.config.num_experts_per_tok * sum(layout.payload for layout in records)
    return {"experts": kinds[0], "down": kinds[1], "total_bytes": plan.total_bytes, "expert_token_bytes": token}


def _experts(index: ExpertIndex, config: ModelConfig) -> dict[str, Experts]:
    names = [f"model.layers.{i}" for i in range(config.num_hidden_layers)] + ["mtp.layers.0"]
    return {
        name: Experts(
            *(part.format for part in layer.parts),
            record_bytes=sum(part.length for part, _ in layer.pieces),
            slot_bytes=layer.record_bytes,
        )
        for name, layer in zip(names, index.layers, strict=False)
    }


def _table(index: RowIndex | None) -> Table | None:
    return index and Table(index.format, index.rows, index.row_bytes, str(index.file))


def _folder_experts(tensors: Mapping[str, tuple[Path, TensorInfo]], config: ModelConfig) -> dict[str, Experts]:
    """By layer, whatever the layout: types by the tensors' names, bytes with what belongs to them (scales)."""
    sizes: Counter[str] = Counter()
    types: dict[str, dict[str, str]] = defaultdict(dict)
    bits = config.quantization and f"{config.quantization['bits']}-bit"
    for name, (_, info) in tensors.items():
        if ".mlp.experts." not in (canonical := canonical_name(name)):
            continue
        layer = canonical.split(".mlp.")[0]
        sizes[layer] += info.stop - info.start
        match = re.search(r"(gate_up|gate|up|down)_proj(\.weight)?$", name)
        for part in match[1].split("_") if match else ():
            types[layer][part] = str(bits) if info.dtype == "U32" else info.dtype
    order = sorted(sizes, key=lambda name: (name.startswith("mtp."), int(name.rsplit(".", 1)[1])))
    return {
        layer: Experts(
            *(types[layer].get(part, "?") for part in ("gate", "up", "down")), sizes[layer] // config.num_experts
        )
        for layer in order
    }


def _folder_table(tensors: Mapping[str, tuple[Path, TensorInfo]], config: ModelConfig) -> Table | None:
    parts = [
        (file, info) for name, (file, info) in tensors.items() if ".ngram_embedding." in name and len(info.shape) == 2
    ]
    rows = sum(info.shape[0] for _, info in parts if info.dtype != "U32" or config.quantization)
    if not parts or not rows:
        return None
    kinds = {info.dtype for _, info in parts}
    kind = f"{config.quantization['bits']}-bit" if config.quantization and "U32" in kinds else min(kinds)
    if "U32" in kinds:  # weight, scales and biases have the same rows
        rows = sum(info.shape[0] for _, info in parts if info.dtype == "U32")
    size = sum(info.stop - info.start for _, info in parts)
    return Table(kind, rows, size // rows, parts[0][0].name)


def _dense_types(
    tensors: Mapping[str, TensorInfo], blocks: Mapping[str, str], config: ModelConfig
) -> dict[str, tuple[str, int]]:
    """Type and bytes by name; the tensors of an ``mx.quantize``d weight count as one type."""
    section = config.quantization or {}
    out = {}
    for name, info in tensors.items():
        path = re.sub(r"\.(weight|scales|biases)$", "", name)
        kind = blocks.get(name, info.dtype)
        if f"{path}.scales" in tensors:
            own = section.get(path)
            kind = f"{(own if isinstance(own, Mapping) else section).get('bits', '?')}-bit"
        out[name] = (kind, info.stop - info.start)
    return out


def _ranges(numbers: Iterable[int], layers: int) -> str:
    """0-3, 7 and so on; ``layers`` is the draft layer."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][-1] == number - 1 and number != layers:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(
        "draft" if run[0] == layers else f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs
    )
