"""Where the experts and the n-gram rows lie on disk: files, offsets, lengths, and places in a record.

A record is one expert as it is in memory: gate, up and down one after the other, each from a multiple of
``PLACE_BYTES`` on, since kernels read words. Every layer has its own formats and so its own record size; each expert's
parts may lie anywhere. Knows no MLX and reads nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
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
    """

    format: str
    shape: tuple[int, int]
    length: int
    files: np.ndarray
    offsets: np.ndarray

    def __post_init__(self) -> None:
        if self.length <= 0 or self.offsets.ndim != 1 or self.files.shape != self.offsets.shape:
            raise ValueError(f"{self.length} bytes at {self.offsets.shape} offsets in {self.files.shape} files")
        if self.offsets.size and (self.offsets.min() < 0 or self.files.min() < 0):
            raise ValueError("an offset or a file number is negative")

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
        """In the order of the record."""
        return self.gate, self.up, self.down

    @property
    def experts(self) -> int:
        """How many there are."""
        return self.gate.offsets.size

    @property
    def record_bytes(self) -> int:
        """Bytes of one expert, the gaps between its parts included."""
        return self.places[2] + self.down.length

    @property
    def places(self) -> tuple[int, int, int]:
        """Where gate, up and down start in the record."""
        up = _rounded(self.gate.length)
        return 0, up, _rounded(up + self.up.length)


@dataclass(frozen=True)
class ExpertIndex:
    """Every layer's experts (the draft layer's last) in the files that hold them."""

    files: tuple[Path, ...]
    layers: tuple[LayerIndex, ...]

    def __post_init__(self) -> None:
        for i, layer in enumerate(self.layers):
            if any(part.files.max(initial=0) >= len(self.files) for part in layer.parts):
                raise ValueError(f"layer {i} names a file that is not among the {len(self.files)}")

    def joined(self, other: ExpertIndex) -> ExpertIndex:
        """These layers and then the other's, as of a draft layer in a file of its own."""
        shift = len(self.files)
        moved = [
            LayerIndex(*(replace(part, files=part.files + shift) for part in layer.parts)) for layer in other.layers
        ]
        return ExpertIndex((*self.files, *other.files), (*self.layers, *moved))

    def reads(self, layer: int, expert: int) -> tuple[Part, ...]:
        """What to read for one expert: its three parts, fewer where they follow each other in file and record."""
        entry = self.layers[layer]
        out: list[Part] = []
        for part, at in zip(entry.parts, entry.places, strict=True):
            file, offset = self.files[part.files[expert]], int(part.offsets[expert])
            last = out[-1] if out else None
            if last is not None and (last.file, last.offset + last.length, last.at + last.length) == (file, offset, at):
                out[-1] = Part(file, last.offset, last.length + part.length, last.at)
            else:
                out.append(Part(file, offset, part.length, at))
        return tuple(out)


@dataclass(frozen=True)
class RowIndex:
    """A table of rows, one after the other.

    Attributes:
        offset: the first byte in ``file``.
        rows: how many there are.
        width: weights per row.
        row_bytes: bytes per row.
        format: name of the block format, as ``IQ4_NL``.
    """

    file: Path
    offset: int
    rows: int
    width: int
    row_bytes: int
    format: str


def _rounded(at: int) -> int:
    return -(-at // PLACE_BYTES) * PLACE_BYTES
