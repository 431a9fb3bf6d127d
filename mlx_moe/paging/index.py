"""Where the experts and the n-gram rows lie on disk: files, offsets, lengths, and places in a record.

A record is one expert as it is in memory: gate, up and down one after the other, then the scales of those whose scales
lie apart, each from a multiple of ``PLACE_BYTES`` on, since kernels read words. Every layer has its own formats and so
its own record size; each expert's parts may lie anywhere. Knows no MLX and reads nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np

PLACE_BYTES = 16
"""Parts start at multiples of this in a record."""


@dataclass(frozen=True)
class Part:
    """One read: ``length`` bytes at ``offset`` of a file go to byte ``at`` of the record."""

    file: Path
    offset: int
    length: int
    at: int


@dataclass(frozen=True)
class PartIndex:
    """One matrix of every expert of a layer.

    Attributes:
        format: name of the block format, as ``IQ2_XS``.
        shape: (outputs, inputs) of one expert, in weights.
        length: bytes of one expert.
        files: [E] integers, which of the index's files each expert is in.
        offsets: [E] int64, its first byte there.
        scales: of a format whose scales lie apart (F8_E4M3): F32 or BF16 numbers of a shape of their own.
    """

    format: str
    shape: tuple[int, int]
    length: int
    files: np.ndarray
    offsets: np.ndarray
    scales: PartIndex | None = None

    def __post_init__(self) -> None:
        if self.length <= 0 or self.offsets.ndim != 1 or self.files.shape != self.offsets.shape:
            raise ValueError(f"{self.length} bytes at {self.offsets.shape} offsets in {self.files.shape} files")
        if self.offsets.size and (self.offsets.min() < 0 or self.files.min() < 0):
            raise ValueError("an offset or a file number is negative")
        if self.scales is not None and self.scales.offsets.size != self.offsets.size:
            raise ValueError(f"scales of {self.scales.offsets.size} experts for {self.offsets.size}")

    def shifted(self, files: int) -> PartIndex:
        """The same in an index that has so many files before these."""
        scales = self.scales and self.scales.shifted(files)
        return replace(self, files=self.files + files, scales=scales)

    @classmethod
    def strided(
        cls, format: str, shape: tuple[int, int], length: int, file: int, offset: int, stride: int, count: int
    ) -> PartIndex:
        """``count`` experts in one file, the first at ``offset`` and the others every ``stride`` bytes."""
        offsets = offset + stride * np.arange(count, dtype=np.int64)
        return cls(format, shape, length, np.full(count, file, dtype=np.int32), offsets)


@dataclass(frozen=True)
class LayerIndex:
    """The experts of one layer."""

    gate: PartIndex
    up: PartIndex
    down: PartIndex

    def __post_init__(self) -> None:
        if len({part.offsets.size for part in self.parts}) != 1:
            raise ValueError(f"gate, up and down are of {[part.offsets.size for part in self.parts]} experts")

    @property
    def parts(self) -> tuple[PartIndex, PartIndex, PartIndex]:
        """The matrices, in the order of the record."""
        return self.gate, self.up, self.down

    @cached_property
    def pieces(self) -> tuple[tuple[PartIndex, int], ...]:
        """All that an expert's record holds, in its order: what, and where it starts."""
        out, at = [], 0
        for part in (*self.parts, *(part.scales for part in self.parts if part.scales is not None)):
            out.append((part, at))
            at = _rounded(at + part.length)
        return tuple(out)

    @property
    def experts(self) -> int:
        """How many there are."""
        return self.gate.offsets.size

    @property
    def record_bytes(self) -> int:
        """Bytes of one expert, the gaps between its parts included."""
        last, at = self.pieces[-1]
        return at + last.length

    @property
    def places(self) -> tuple[int, int, int]:
        """Where gate, up and down start in the record."""
        return tuple(at for _, at in self.pieces[:3])

    @property
    def scale_places(self) -> tuple[int | None, int | None, int | None]:
        """Where the scales of gate, up and down start; None for those without."""
        places = iter(at for _, at in self.pieces[3:])
        return tuple(None if part.scales is None else next(places) for part in self.parts)


@dataclass(frozen=True)
class ExpertIndex:
    """Every layer's experts (the draft layer's last) in the files that hold them."""

    files: tuple[Path, ...]
    layers: tuple[LayerIndex, ...]

    def __post_init__(self) -> None:
        for i, layer in enumerate(self.layers):
            if any(part.files.max(initial=0) >= len(self.files) for part, _ in layer.pieces):
                raise ValueError(f"layer {i} names a file that is not among the {len(self.files)}")

    def joined(self, other: ExpertIndex) -> ExpertIndex:
        """These layers and then the other's, as of a draft layer in a file of its own."""
        moved = [LayerIndex(*(part.shifted(len(self.files)) for part in layer.parts)) for layer in other.layers]
        return ExpertIndex((*self.files, *other.files), (*self.layers, *moved))

    @cached_property
    def tables(self) -> tuple[np.ndarray, ...]:
        """What to read for each expert: of every layer int64 [E, parts, 4].

        The four are a part's file number, its offset there, its length and its place in the record. A part that
        follows the one before in file and record is counted with it; its own length is 0 then.
        """
        return tuple(_table(layer) for layer in self.layers)

    def reads(self, layer: int, expert: int) -> tuple[Part, ...]:
        """What to read for one expert: its parts and scales, in one read where they follow each other."""
        parts = self.tables[layer][expert].tolist()
        return tuple(Part(self.files[file], offset, length, at) for file, offset, length, at in parts if length)


@dataclass(frozen=True)
class RowIndex:
    """A table of rows, one after the other.

    Attributes:
        offset: the first byte in ``file``.
        rows: how many there are.
        width: weights per row.
        row_bytes: bytes per row.
        format: name of the block format, as ``IQ4_NL``.
        scale: of a format whose scales lie apart (F8_E4M3): one number for the whole table.
    """

    file: Path
    offset: int
    rows: int
    width: int
    row_bytes: int
    format: str
    scale: float | None = None

    @property
    def files(self) -> tuple[Path, ...]:
        """That hold rows."""
        return (self.file,)

    def places(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Of rows [n]: which of ``files`` each is in, and its first byte there; int64."""
        return np.zeros(rows.shape, dtype=np.int64), self.offset + rows.astype(np.int64) * self.row_bytes

    def row(self, file: int, at: int) -> int:
        """Which row holds a byte of one of ``files``."""
        return (at - self.offset) // self.row_bytes


@dataclass(frozen=True)
class JoinedRows:
    """A table of rows in several parts that follow each other, as the shards of a checkpoint; else like a RowIndex."""

    parts: tuple[RowIndex, ...]

    def __post_init__(self) -> None:
        kinds = {(part.width, part.row_bytes, part.format, part.scale) for part in self.parts}
        if len(kinds) != 1:
            raise ValueError(f"a table of {len(self.parts)} parts of {len(kinds)} kinds; needed: one kind")

    @cached_property
    def _starts(self) -> list[int]:
        """The first row of each part."""
        return [0, *np.cumsum([part.rows for part in self.parts[:-1]]).tolist()]

    @property
    def file(self) -> Path:
        """The first part's; messages name it."""
        return self.parts[0].file

    @property
    def files(self) -> tuple[Path, ...]:
        """See RowIndex."""
        return tuple(dict.fromkeys(part.file for part in self.parts))

    @property
    def rows(self) -> int:
        """See RowIndex."""
        return sum(part.rows for part in self.parts)

    @property
    def width(self) -> int:
        """See RowIndex."""
        return self.parts[0].width

    @property
    def row_bytes(self) -> int:
        """See RowIndex."""
        return self.parts[0].row_bytes

    @property
    def format(self) -> str:
        """See RowIndex."""
        return self.parts[0].format

    @property
    def scale(self) -> float | None:
        """See RowIndex."""
        return self.parts[0].scale

    def places(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """See RowIndex."""
        starts = np.array(self._starts)
        part = np.searchsorted(starts, rows, side="right") - 1
        offsets = np.array([one.offset for one in self.parts])
        numbers = np.array([self.files.index(one.file) for one in self.parts])
        return numbers[part], offsets[part] + (rows - starts[part]) * self.row_bytes

    def row(self, file: int, at: int) -> int:
        """See RowIndex."""
        inside = (
            start + part.row(0, at)
            for start, part in zip(self._starts, self.parts, strict=True)
            if part.file == self.files[file] and 0 <= part.row(0, at) < part.rows
        )
        return next(inside)


def _table(layer: LayerIndex) -> np.ndarray:
    """See ExpertIndex.tables."""
    out = np.empty((layer.experts, len(layer.pieces), 4), dtype=np.int64)
    for i, (part, at) in enumerate(layer.pieces):
        out[:, i] = np.stack(np.broadcast_arrays(part.files, part.offsets, part.length, at), axis=-1)
    experts, last = np.arange(layer.experts), np.zeros(layer.experts, dtype=np.intp)
    for i in range(1, len(layer.pieces)):
        file, offset, length, at = out[experts, last].T
        follows = (out[:, i, (0, 1, 3)] == np.stack((file, offset + length, at + length), axis=-1)).all(axis=-1)
        out[experts[follows], last[follows], 2] += out[follows, i, 2]
        out[follows, i, 2] = 0
        last = np.where(follows, last, i)
    return out


def _rounded(at: int) -> int:
    return -(-at // PLACE_BYTES) * PLACE_BYTES
