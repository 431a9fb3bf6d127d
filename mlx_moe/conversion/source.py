"""What a conversion reads, whatever the kind of file: configuration, experts, dense weights, table, tokenizer."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from mlx_moe.config import ConfigError, ModelConfig
from mlx_moe.conversion.stored import Stored
from mlx_moe.formats.safetensors import FileFormatError
from mlx_moe.models.qwen4_exp import Model
from mlx_moe.models.qwen4_exp.gguf_names import Packed
from mlx_moe.paging.index import RowIndex
from mlx_moe.paging.ngram import NgramHash

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class LayerSource:
    """The routed experts of one layer, called ``model.layers.N`` or ``mtp.layers.0``: a matrix per expert and part."""

    name: str
    gate: Sequence[Stored]
    up: Sequence[Stored]
    down: Sequence[Stored]

    @property
    def parts(self) -> tuple[Sequence[Stored], Sequence[Stored], Sequence[Stored]]:
        """In the order of the record."""
        return self.gate, self.up, self.down

    @property
    def formats(self) -> tuple[str, str, str]:
        """Names of the parts' formats."""
        return tuple(part[0].format for part in self.parts)

    @property
    def record_bytes(self) -> int:
        """Bytes of one expert in the file."""
        return sum(part[0].nbytes for part in self.parts)


@dataclass(frozen=True)
class Dense:
    """One weight that stays in memory, by its canonical name.

    Attributes:
        shape: in weights.
        format: name of its format in the file.
        nbytes: in the file.
        read: rows (start, stop) of its first axis: numbers, or blocks as uint8.
        stored: where its rows are as they are, if they lie in the file so.
    """

    name: str
    shape: tuple[int, ...]
    format: str
    nbytes: int
    read: Callable[[int, int], Packed]
    stored: Stored | None = None

    @classmethod
    def of(cls, name: str, stored: Stored) -> Dense:
        """A matrix as it lies in a file."""
        return cls(name, stored.shape, stored.format, stored.nbytes, stored.packed, stored)


@dataclass(frozen=True)
class Source:
    """A model as it was found.

    Attributes:
        kind: "GGUF" or "Hugging Face".
        path: as it was named.
        files: its weight files.
        raw: config.json of a model whose dense weights are the ones here (norm weights are the factors).
        norm_convention: "raw" or "folded", as the file has it.
        layers: the draft layer last.
        table: the n-gram table in parts, one after the other; None for a model without one.
        place: the table as one run of rows, where a file has it so; it can be left there.
        save_tokenizer: writes tokenizer files into a folder.
    """

    kind: str
    path: Path
    files: tuple[Path, ...]
    raw: dict[str, Any]
    config: ModelConfig
    norm_convention: str
    layers: tuple[LayerSource, ...]
    dense: tuple[Dense, ...]
    table: tuple[Stored, ...] | None
    place: RowIndex | None
    save_tokenizer: Callable[[Path], None]

    @property
    def has_mtp(self) -> bool:
        """Whether the draft layer is there."""
        return self.layers[-1].name.startswith("mtp.")


def open_source(path: str | Path, norm_convention: str = "auto") -> Source:
    """Open a Hugging Face folder, a GGUF file or a folder of one; no weight is read but norms and small ones.

    Raises FileNotFoundError, FileFormatError or ConfigError, in one line.
    """
    from mlx_moe.conversion.gguf_source import open_gguf_source
    from mlx_moe.conversion.hf_source import open_hf_source

    path = Path(path).expanduser()
    if not path.exists():
        raise FileNotFoundError(f"{path}: no such file or folder; for a Hub repository, download it first")
    if path.is_dir() and (path / "config.json").exists() and not any(path.glob("*.gguf")):
        return open_hf_source(path, norm_convention)
    return open_gguf_source(path)


def check_complete(where: Path, config: ModelConfig, dense: Iterable[Dense], mtp: bool) -> None:
    """Refuse, naming it, a dense weight that is missing, unknown or of another shape than the model's."""
    model = Model(config, None, None, mtp=mtp)
    want = {name: tuple(array.shape) for name, array in tree_flatten(model.parameters())}
    got = {weight.name: weight.shape for weight in dense}
    for what, names in (("missing", want.keys() - got.keys()), ("unknown to the model", got.keys() - want.keys())):
        if names:
            raise FileFormatError(f"{where}: {len(names)} dense weight(s) {what}, first {min(names)[:120]}")
    for name, shape in want.items():
        if got[name] != shape:
            raise FileFormatError(f"{where}: {name} has shape {got[name]}, needed {shape}")


def check_hashes(where: Path, config: ModelConfig, buffers: Mapping[str, mx.array]) -> None:
    """Hash constants of a file, by canonical name, must be those that the configuration gives."""
    for name, found in buffers.items():
        layer, _, field = name.removeprefix("model.layers.").partition(".ple.ple_embedding.")
        index = config.ple_index(int(layer)) if layer.isdecimal() and len(layer) < 5 else None
        if index is None:
            raise ConfigError(f"{where}: {name} is not of a layer that ple_layer_ids names")
        table = NgramHash.from_config(config, index)
        want = {
            "layer_multipliers": table.multipliers,
            "ngram_heads_vocab_sizes": table.sizes,
            "ngram_heads_offsets": table.offsets,
        }[field]
        if found.ndim != 1 or tuple(found.tolist()) != want:
            raise ConfigError(f"{where}: {name} is not what seed and ngram_vocab_size_base give")


def check_table(where: Path, config: ModelConfig, parts: Sequence[Stored]) -> None:
    """The table must have the rows and the width that the configuration gives."""
    if len(config.ple_layer_ids) > 1:
        raise ConfigError(f"{where}: ple_layer_ids is {list(config.ple_layer_ids)}; a pack holds one n-gram table")
    want = (NgramHash.from_config(config, 0).rows, config.ple_embed_dim // config.ngram_heads)
    found = (sum(part.shape[0] for part in parts), parts[0].shape[1])
    if found != want:
        raise FileFormatError(f"{where}: the n-gram table has shape {found}, needed {want}")
