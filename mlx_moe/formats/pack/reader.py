"""Opening a pack: what it holds and where, without reading any weight."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import mlx.core as mx

from custom_kernels.ggml_blocks import BlockFormat, format_by_name
from mlx_moe.config import ModelConfig, read_config
from mlx_moe.formats.pack.layout import PAGE_BYTES, PARTS, RecordLayout, check_version, packable, read_json
from mlx_moe.formats.pack.reference import TableReference
from mlx_moe.formats.safetensors import FileFormatError, TensorInfo, load_tensors, read_header
from mlx_moe.models.qwen4_exp.gguf_names import Packed
from mlx_moe.paging.index import ExpertIndex, LayerIndex, PartIndex, RowIndex
from mlx_moe.paging.ngram import NgramHash

_PLAIN = {"F32": "F32", "F16": "F16", "BF16": "BF16"}
"""Types of tensors that are numbers, and the format of each."""


@dataclass(frozen=True)
class PackFile:
    """One weight file: its tensors and metadata, checked."""

    path: Path
    tensors: Mapping[str, TensorInfo]
    metadata: Mapping[str, str]

    @classmethod
    def read(cls, path: Path) -> PackFile:
        """Raises FileFormatError when it is damaged or of another version."""
        tensors, metadata = read_header(path)
        check_version(path, metadata)
        return cls(path, tensors, metadata)

    def described(self, key: str) -> dict[str, Any]:
        """A metadata object by tensor; every tensor that it names is there."""
        value = read_json(self.path, self.metadata, key)
        if missing := value.keys() - self.tensors.keys():
            raise FileFormatError(f"{self.path}: metadata {key!r} names {min(missing)[:120]!r}, which is not there")
        return value


def is_pack(folder: str | Path) -> bool:
    """Whether a folder is a pack, by its config.json."""
    folder = Path(folder)
    return (folder / "config.json").is_file() and "pack" in read_config(folder)


def open_pack(folder: str | Path) -> Pack:
    """Open a pack: every header is read and checked, no weight is.

    Raises FileFormatError or ConfigError, in one line naming the file: a file that is missing, truncated, damaged, of
    an unknown ``format_version`` or ``layout``, or of another model.
    """
    folder = Path(folder)
    raw = read_config(folder)
    where = folder / "config.json"
    section = raw.get("pack")
    if not isinstance(section, Mapping):
        raise FileFormatError(f"{where}: has no section 'pack'; make a pack with mlx-moe convert")
    check_version(where, section)
    config = ModelConfig.from_dict(raw)
    files = {kind: _files(folder, kind) for kind in ("model", "experts", "ngram")}
    reference = TableReference.from_json(where, section["ngram"]) if "ngram" in section else None
    return Pack(folder, raw, config, files, reference)


def _files(folder: Path, kind: str) -> list[PackFile]:
    """The weight files of one kind. Numbered names say how many there must be."""
    paths = sorted(path for path in folder.glob(f"{kind}*.safetensors"))
    numbers = [path.stem.split("-of-")[1] for path in paths if "-of-" in path.stem]
    if numbers and (len({*numbers}) > 1 or not numbers[0].isdecimal() or int(numbers[0][:9]) != len(paths)):
        raise FileFormatError(f"{folder}: holds {len(paths)} files {kind}-…-of-{numbers[0]}; copy the pack again")
    return [PackFile.read(path) for path in paths]


class Pack:
    """A pack's contents by kind, as ``gguf_model`` has them of a GGUF file.

    Attributes:
        folder: where it is.
        raw: the contents of config.json.
        config: the model's configuration.
        experts: where every routed expert lies, the draft layer's last.
        reference: where the n-gram table was left, if it is not in the pack.
    """

    def __init__(
        self,
        folder: Path,
        raw: dict[str, Any],
        config: ModelConfig,
        files: Mapping[str, list[PackFile]],
        reference: TableReference | None,
    ):
        self.folder, self.raw, self.config, self.reference = folder, raw, config, reference
        self._files = files
        self._check_names()
        self.experts: ExpertIndex = self._expert_index()
        self._own_table = self._table_index()
        self.blocks: Mapping[str, BlockFormat] = self._block_formats()

    @property
    def files(self) -> list[PackFile]:
        """All weight files: dense, experts, table."""
        return [file for files in self._files.values() for file in files]

    @property
    def dense_tensors(self) -> dict[str, TensorInfo]:
        """Every dense tensor by canonical name; what ``mx.quantize`` packed has ``scales`` and ``biases`` beside it."""
        return {name: info for file in self._files["model"] for name, info in file.tensors.items()}

    @property
    def has_mtp(self) -> bool:
        """Whether the draft layer is there."""
        return len(self.experts.layers) > self.config.num_hidden_layers

    @cached_property
    def rows(self) -> RowIndex | None:
        """Where the n-gram table lies; None for a model without one.

        Raises FileFormatError when it was left in another file that has moved or changed.
        """
        return self.reference.find(self.folder) if self.reference else self._own_table

    def dense(self) -> Iterator[tuple[str, Packed | mx.array]]:
        """Canonical name and contents of every dense weight, read lazily.

        Numbers and blocks come as ``Packed``, as ``read_weights`` gives them; the three tensors of a weight that
        ``mx.quantize`` packed come as arrays (``config.quantization`` says how).
        """
        for file in self._files["model"]:
            tensors = load_tensors(file.path)
            for name, info in file.tensors.items():
                if name in self.blocks:
                    yield name, Packed(tensors[name], self.blocks[name])
                elif info.dtype in _PLAIN and not self._quantised(name):
                    yield name, Packed(tensors[name], format_by_name(_PLAIN[info.dtype]))
                else:
                    yield name, tensors[name]

    def _quantised(self, name: str) -> bool:
        return name.endswith((".scales", ".biases"))

    def _check_names(self) -> None:
        seen: dict[str, Path] = {}
        for file in self.files:
            for name in file.tensors:
                if name in seen:
                    raise FileFormatError(f"{file.path}: tensor {name[:120]!r} is also in {seen[name].name}")
                seen[name] = file.path
        if not self._files["model"]:
            raise FileFormatError(f"{self.folder}: holds no model*.safetensors; copy the pack again")

    def _block_formats(self) -> dict[str, BlockFormat]:
        out = {}
        for file in self._files["model"]:
            for name, format in file.described("blocks").items():
                where, info = f"{file.path}: tensor {name[:120]!r}", file.tensors[name]
                out[name] = packable(where, format)
                if info.dtype != "U8" or not info.shape or info.shape[-1] % out[name].block_bytes:
                    raise FileFormatError(f"{where}: {info.dtype} {list(info.shape)} are no rows of {format} blocks")
        return out

    def _expert_index(self) -> ExpertIndex:
        layers: dict[str, LayerIndex] = {}
        files = self._files["experts"]
        for number, file in enumerate(files):
            for name, entry in file.described("records").items():
                layer = entry.get("layer") if isinstance(entry, dict) else None
                if not isinstance(layer, str) or layer in layers:
                    raise FileFormatError(f"{file.path}: records of layer {str(layer)[:60]!r} have no place or two")
                layers[layer] = self._layer_index(file, number, name, entry)
        wanted = [f"model.layers.{i}" for i in range(self.config.num_hidden_layers)]
        wanted += ["mtp.layers.0"] * ("mtp.layers.0" in layers)
        if missing := [name for name in wanted if name not in layers]:
            raise FileFormatError(f"{self.folder}: the experts of {missing[0]} are missing; copy the pack again")
        if surplus := sorted(layers.keys() - set(wanted)):
            raise FileFormatError(f"{self.folder}: experts of {surplus[0][:60]!r} do not belong to config.json's model")
        return ExpertIndex(tuple(file.path for file in files), tuple(layers[name] for name in wanted))

    def _layer_index(self, file: PackFile, number: int, name: str, entry: Any) -> LayerIndex:
        where, info = f"{file.path}: tensor {name[:120]!r}", file.tensors[name]
        record = RecordLayout.from_json(where, entry, self.config.hidden_size, self.config.moe_intermediate_size)
        want = (self.config.num_experts, record.stride)
        if info.dtype != "U8" or info.shape != want or info.start % PAGE_BYTES:
            found = f"{info.dtype} {list(info.shape)} at byte {info.start}"
            raise FileFormatError(f"{where}: {found}; needed: U8 {list(want)} at a multiple of {PAGE_BYTES}")
        parts = [
            PartIndex.strided(
                part.format.name,
                part.shape,
                part.length,
                number,
                info.start + part.offset,
                record.stride,
                self.config.num_experts,
            )
            for part in record.parts
        ]
        return LayerIndex(**dict(zip(PARTS, parts, strict=True)))

    def _table_index(self) -> RowIndex | None:
        tables = [
            (file, name, entry) for file in self._files["ngram"] for name, entry in file.described("tables").items()
        ]
        if len(tables) + (self.reference is not None) != len(self.config.ple_layer_ids):
            count = len(self.config.ple_layer_ids)
            raise FileFormatError(f"{self.folder}: {len(tables)} n-gram tables; needed: {count}; copy the pack again")
        if not tables:
            self._check_reference()
            return None
        file, name, entry = tables[0]
        where, info = f"{file.path}: tensor {name[:120]!r}", file.tensors[name]
        form = packable(where, entry.get("format") if isinstance(entry, dict) else None)
        width = self._row_width()
        rows = NgramHash.from_config(self.config, 0).rows
        if width % form.block_weights or info.dtype != "U8" or info.shape != (rows, form.row_bytes(width)):
            found = f"{info.dtype} {list(info.shape)}"
            raise FileFormatError(f"{where}: {found} are not {rows} {form.name} rows of {width} weights")
        return RowIndex(file.path, info.start, info.shape[0], width, info.shape[1], form.name)

    def _check_reference(self) -> None:
        if self.reference is None:
            return
        found = (self.reference.rows, self.reference.width)
        if found != (NgramHash.from_config(self.config, 0).rows, self._row_width()):
            raise FileFormatError(f"{self.folder}: pack.ngram has shape {found}; of another model than config.json")

    def _row_width(self) -> int:
        return self.config.ple_embed_dim // self.config.ngram_heads
