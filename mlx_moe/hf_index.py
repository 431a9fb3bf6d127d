"""Where the experts and the n-gram rows of a Hugging Face folder lie, to be read in place: an index from headers alone.

Experts stay as the files have them: BF16, F16 or F32 numbers, or F8_E4M3 with one scale per 128 x 128 weights beside.
What cannot be read so says why, by name of the weight.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from custom_kernels.ggml_blocks import format_by_name
from mlx_moe.config import ModelConfig
from mlx_moe.conversion.hf_source import Streamed, find_streamed
from mlx_moe.conversion.source import LayerSource
from mlx_moe.conversion.stored import Stored
from mlx_moe.paging.index import ExpertIndex, JoinedRows, LayerIndex, PartIndex, RowIndex

SCALES = ("F32", "BF16")
"""Types of scales that kernels read in a record."""
PARTS = ("gate", "up", "down")
_REMEDY = "make a pack of the folder with 'mlx-moe convert', or load it with all experts in memory"


class NotInPlace(ValueError):
    """Weights that can be loaded, but not be read in place. The message names them and the remedy, not the folder."""


@dataclass(frozen=True)
class FolderIndex:
    """Experts of every layer, the draft layer's last if there is one, and the n-gram table without its scale."""

    experts: ExpertIndex
    table: tuple[Stored, ...] | None

    def rows(self) -> RowIndex | JoinedRows | None:
        """Where the table's rows lie; reads the one scale of a table in F8_E4M3. None for a model without a table."""
        if self.table is None:
            return None
        parts = tuple(_run(part) for part in self.table)
        return parts[0] if len(parts) == 1 else JoinedRows(parts)


def folder_index(path: Path, config: ModelConfig) -> FolderIndex:
    """The index of a folder of safetensors.

    Raises FileFormatError or ConfigError, in one line, for what is missing or of another shape, and NotInPlace for what
    can be used in other ways only.
    """
    if len(config.ple_layer_ids) > 1:
        layers = list(config.ple_layer_ids)
        raise NotInPlace(f"ple_layer_ids is {layers}; where experts stream, one n-gram table can be read")
    found = find_streamed(path, config)
    _check_table(found)
    files = sorted({stored.file for layer in found.layers for part in layer.parts for stored in _all(part)})
    numbers = {file: i for i, file in enumerate(files)}
    return FolderIndex(
        ExpertIndex(tuple(files), tuple(_layer(layer, numbers) for layer in found.layers)),
        found.table,
    )


def _all(part: Sequence[Stored]) -> list[Stored]:
    return [*part, *(matrix.scale for matrix in part if matrix.scale is not None)]


def _check_table(found: Streamed) -> None:
    for part in found.table or ():
        if part.scale is not None and part.scale.shape != (1, 1):
            shape = part.scale.shape
            raise NotInPlace(f"the n-gram table has FP8 scales of shape {shape}, read in place: one; {_REMEDY}")


def _layer(layer: LayerSource, numbers: dict[Path, int]) -> LayerIndex:
    return LayerIndex(
        *(
            _part(f"{layer.name}.mlp.experts", name, part, numbers)
            for name, part in zip(PARTS, layer.parts, strict=True)
        )
    )


def _part(where: str, name: str, part: Sequence[Stored], numbers: dict[Path, int]) -> PartIndex:
    """One matrix of every expert; all have one shape and one format."""
    first = part[0]
    if first.scale is None:
        return _placed(part, numbers)
    wanted = format_by_name(first.format).scale_shape(*first.shape)
    for e, matrix in enumerate(part):
        scale = matrix.scale
        if scale.shape != wanted or scale.format not in SCALES or scale.format != first.scale.format:
            found = f"{scale.format} scales {scale.shape}"
            needed = f"{wanted} in {' or '.join(SCALES)}, one type for all experts"
            raise NotInPlace(
                f"{where}.{e}.{name}_proj has {found} ({scale.file.name}); read in place: {needed}; {_REMEDY}"
            )
    return _placed(part, numbers, _placed([matrix.scale for matrix in part], numbers))


def _placed(part: Sequence[Stored], numbers: dict[Path, int], scales: PartIndex | None = None) -> PartIndex:
    first = part[0]
    files = np.array([numbers[matrix.file] for matrix in part], dtype=np.int32)
    offsets = np.array([matrix.offset for matrix in part], dtype=np.int64)
    return PartIndex(first.format, first.shape, first.nbytes, files, offsets, scales)


def _run(part: Stored) -> RowIndex:
    rows, width = part.shape
    scale = None if part.scale is None else part.scale.numbers(0, 1).item()
    return RowIndex(part.file, part.offset, rows, width, part.row_bytes, part.format, scale)
