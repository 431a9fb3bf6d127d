"""The header of one GGUF file: metadata, and where each tensor lies. No tensor is read.

Whatever the bytes are, the result is a consistent header or a FileFormatError of one line, and memory stays within a
constant times the size of the header.
"""

from __future__ import annotations

import math
import mmap
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from custom_kernels.ggml_blocks import FORMATS, BlockFormat, format_by_id
from mlx_moe.formats.gguf.fields import Cursor
from mlx_moe.formats.safetensors import FileFormatError

MAGIC = b"GGUF"
VERSIONS = (2, 3)
MAX_HEADER_BYTES = 256 << 20  # a vocabulary of 250,000 tokens with its merges takes 11 MB
_MIN_BYTES = 24  # magic, version, two counts
_MAX_KEY_BYTES = 65535
_MAX_NAME_BYTES = 256
_MAX_DIMS = 4
_MAX_DIM = (1 << 31) - 1  # what an MLX array can have
_ALIGNMENTS = tuple(1 << bits for bits in range(3, 17))
_SUPPORTED = frozenset(format.type_id for format in FORMATS)


@dataclass(frozen=True, slots=True)
class TensorPlace:
    """Where a tensor lies.

    Attributes:
        name: as in the file.
        file: which file.
        offset: of the first byte, from the start of the file.
        shape: in weights, row-major: rows of the last axis are contiguous (the file states it in reverse).
        type_id: ggml's number of the block format.
        size: in bytes; None when the format is not supported.
    """

    name: str
    file: Path
    offset: int
    shape: tuple[int, ...]
    type_id: int
    size: int | None

    @property
    def format(self) -> BlockFormat:
        """What the bytes mean. Raises FileFormatError when the format is not supported."""
        try:
            return format_by_id(self.type_id)
        except ValueError as error:
            raise FileFormatError(
                f"{self.file}: tensor {self.name[:120]!r}: {error}; use another quantisation"
            ) from None

    @property
    def row_bytes(self) -> int:
        """Bytes of one row of the last axis."""
        return self.format.row_bytes(self.shape[-1] if self.shape else 1)


@dataclass(frozen=True)
class Header:
    """One file's metadata (numbers, bools, str and tuples of them) and its tensors by name."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, TensorPlace]


def read_header(path: str | Path) -> Header:
    """The checked header of one file.

    Raises FileFormatError, in one line that names the file, when it is missing, not a GGUF file of a known version,
    truncated, or when any count, length, dimension or offset does not fit the file or the others.
    """
    path = Path(path)
    try:
        state = path.stat()
        if not stat.S_ISREG(state.st_mode):
            raise FileFormatError(f"{path}: is not a file; name a .gguf file")
        with path.open("rb") as file:
            return _read(path, file, state.st_size)
    except (OSError, ValueError) as error:  # ValueError: a name that no file can have
        if isinstance(error, FileFormatError):
            raise
        raise FileFormatError(f"{path}: cannot be read ({getattr(error, 'strerror', None) or error})") from None


def _read(path: Path, file: BinaryIO, size: int) -> Header:
    _check_start(path, file.read(8), size)
    end = min(size, MAX_HEADER_BYTES)
    with mmap.mmap(file.fileno(), end, access=mmap.ACCESS_READ) as data:
        cursor = Cursor(path, data, end)
        cursor.take(8, "the version")
        tensor_count = cursor.count(_MIN_BYTES, "the number of tensors")
        metadata = _metadata(cursor)
        infos = [_tensor_info(cursor) for _ in range(tensor_count)]
    alignment = _alignment(path, metadata)
    start = -(-cursor.at // alignment) * alignment
    for name, _, _, offset in infos:
        if offset % alignment:
            raise cursor.error(f"tensor {name[:120]!r} has offset {offset}, no multiple of the alignment {alignment}")
    places = [_place(path, info, start, size) for info in infos]
    _check_layout(path, places)
    return Header(path, metadata, {place.name: place for place in places})


def _check_start(path: Path, start: bytes, size: int) -> None:
    if start[:4] != MAGIC:
        pointer = " but a Git LFS pointer" if start.startswith(b"version ") else ""
        raise FileFormatError(f"{path}: is not a GGUF file{pointer}; download the file itself")
    if size < _MIN_BYTES:
        raise FileFormatError(f"{path}: ends after {size} bytes; truncated, download it again")
    if (version := int.from_bytes(start[4:8], "little")) not in VERSIONS:
        big = int.from_bytes(start[4:8], "big") in (1, *VERSIONS)
        found = "big-endian" if big else f"of GGUF version {version}"
        raise FileFormatError(f"{path}: is {found}; supported: little-endian, version 2 and 3: convert it again")


def _metadata(cursor: Cursor) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for _ in range(cursor.count(13, "the number of metadata keys")):
        key = cursor.string("a metadata key", _MAX_KEY_BYTES)
        what = f"metadata key {key[:120]!r}"
        if key in out:
            raise cursor.error(f"{what} stands twice")
        out[key] = cursor.value(cursor.number("<I", what), what)
    return out


def _tensor_info(cursor: Cursor) -> tuple[str, tuple[int, ...], int, int]:
    """(name, shape in the file's order, type, offset from the start of the data)."""
    name = cursor.string("a tensor name", _MAX_NAME_BYTES)
    what = f"tensor {name[:120]!r}"
    count = cursor.number("<I", what)
    if count > _MAX_DIMS:
        raise cursor.error(f"{what} has {count} dimensions, allowed are {_MAX_DIMS}")
    shape = tuple(cursor.number("<Q", what) for _ in range(count))
    if not all(0 < n <= _MAX_DIM for n in shape):
        raise cursor.error(f"{what} has dimensions {shape}, allowed are 1 to {_MAX_DIM}")
    return name, shape, cursor.number("<I", what), cursor.number("<Q", what)


def _alignment(path: Path, metadata: dict[str, Any]) -> int:
    value = metadata.get("general.alignment", 32)
    if type(value) is not int or value not in _ALIGNMENTS:
        allowed = f"a power of two from {_ALIGNMENTS[0]} to {_ALIGNMENTS[-1]}"
        raise FileFormatError(f"{path}: general.alignment is {str(value)[:40]}; allowed: {allowed}, convert it again")
    return value


def _place(path: Path, info: tuple[str, tuple[int, ...], int, int], start: int, size: int) -> TensorPlace:
    """The tensor of an info, in a file of ``size`` bytes whose data starts at ``start``."""
    name, dims, type_id, offset = info
    where = f"{path}: tensor {name[:120]!r}"
    n_bytes = None
    if type_id in _SUPPORTED:
        try:
            n_bytes = math.prod(dims[1:]) * format_by_id(type_id).row_bytes(dims[0] if dims else 1)
        except ValueError as error:
            raise FileFormatError(f"{where}: {error}; convert it again") from None
    if start + offset + (n_bytes or 0) > size:
        raise FileFormatError(f"{where} ends beyond the file's {size} bytes; truncated or corrupt, download it again")
    return TensorPlace(name, path, start + offset, dims[::-1], type_id, n_bytes)


def _check_layout(path: Path, places: list[TensorPlace]) -> None:
    """No tensor stands twice or starts within another."""
    names: set[str] = set()
    before = None
    for place in sorted(places, key=lambda place: (place.offset, place.size or 0)):
        where = f"{path}: tensor {place.name[:120]!r}"
        if place.name in names:
            raise FileFormatError(f"{where} stands twice; corrupt, download it again")
        if before is not None and place.offset < before.offset + (before.size or 1):
            raise FileFormatError(f"{where} overlaps {before.name[:120]!r}; corrupt, download it again")
        names.add(place.name)
        before = place
