"""Safetensors headers, checked before any tensor is read.

MLX reads the tensors; this module makes sure that the file is whole and says which file is not.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx

MAX_HEADER_BYTES = 100 << 20
_ITEM_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "U16": 2, "I16": 2, "F16": 2, "BF16": 2,
    "U32": 4, "I32": 4, "F32": 4, "U64": 8, "I64": 8,
}  # fmt: skip


class FileFormatError(ValueError):
    """A file that is truncated, corrupt or not what its name says. The message names the file."""


@dataclass(frozen=True)
class TensorInfo:
    """One tensor of a safetensors file; start and stop are absolute file offsets."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


def read_header(path: str | Path) -> tuple[dict[str, TensorInfo], dict[str, str]]:
    """Tensors and metadata of a safetensors file.

    Raises FileFormatError when lengths, offsets, shapes or types do not fit the file or each other.
    """
    path = Path(path)
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(_exactly(path, file.read(8), 8), "little")
            if length > min(MAX_HEADER_BYTES, size - 8):
                raise FileFormatError(f"{path}: header of {length} bytes in a file of {size}; truncated or corrupt")
            header = _json(path, _exactly(path, file.read(length), length))
    except OSError as error:
        raise FileFormatError(f"{path}: cannot be read ({error.strerror or error})") from None
    metadata = header.pop("__metadata__", None) or {}  # MLX writes null where there is none
    if not isinstance(metadata, dict):
        raise FileFormatError(f"{path}: __metadata__ is not an object")
    tensors = {name: _tensor(path, name, entry, 8 + length, size) for name, entry in header.items()}
    _check_layout(path, tensors, 8 + length, size)
    return tensors, {str(key): str(value) for key, value in metadata.items()}


def load_tensors(path: str | Path) -> dict[str, mx.array]:
    """All tensors of a checked file, lazily: bytes are read when an array is evaluated. FP8 comes as uint8."""
    read_header(path)
    try:
        return dict(mx.load(str(path), format="safetensors"))
    except (RuntimeError, ValueError) as error:
        raise FileFormatError(f"{path}: cannot be loaded ({error})") from None


def _exactly(path: Path, data: bytes, count: int) -> bytes:
    if len(data) != count:
        raise FileFormatError(f"{path}: ends after {len(data)} of {count} header bytes; truncated")
    return data


def _json(path: Path, data: bytes) -> dict[str, Any]:
    try:
        header = json.loads(data, object_pairs_hook=lambda pairs: _unique(path, pairs))
    except (ValueError, RecursionError) as error:
        if isinstance(error, FileFormatError):
            raise
        raise FileFormatError(f"{path}: header is not JSON ({error})") from None
    if not isinstance(header, dict):
        raise FileFormatError(f"{path}: header is not a JSON object")
    return header


def _unique(path: Path, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    out = dict(pairs)
    if len(out) != len(pairs):
        raise FileFormatError(f"{path}: a name stands twice in the header")
    return out


def _whole(value: Any, bits: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << bits


def _tensor(path: Path, name: str, entry: Any, base: int, size: int) -> TensorInfo:
    where = f"{path}: tensor {name[:120]!r}"
    if not isinstance(entry, dict):
        raise FileFormatError(f"{where} has no description")
    dtype, shape, offsets = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in _ITEM_BYTES:
        raise FileFormatError(f"{where} has type {str(dtype)[:40]!r}; supported: {', '.join(_ITEM_BYTES)}")
    if not isinstance(shape, list) or len(shape) > 8 or not all(_whole(n, 31) for n in shape):
        raise FileFormatError(f"{where} has shape {str(shape)[:80]}")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(_whole(n, 63) for n in offsets):
        raise FileFormatError(f"{where} has offsets {str(offsets)[:80]}")
    start, stop = base + offsets[0], base + offsets[1]
    if start > stop or stop > size:
        raise FileFormatError(f"{where} ends at byte {stop} of a file of {size}; truncated or corrupt")
    if math.prod(shape) * _ITEM_BYTES[dtype] != stop - start:
        raise FileFormatError(f"{where}: {dtype} {shape} does not fill its {stop - start} bytes")
    return TensorInfo(dtype, tuple(shape), start, stop)


def _check_layout(path: Path, tensors: dict[str, TensorInfo], base: int, size: int) -> None:
    """Tensors follow each other without overlap or gap and end with the file, as the format demands."""
    end = base
    for name, tensor in sorted(tensors.items(), key=lambda item: (item[1].start, item[1].stop)):
        if tensor.start != end:
            raise FileFormatError(f"{path}: tensor {name[:120]!r} starts at byte {tensor.start}, not {end}; corrupt")
        end = tensor.stop
    if end != size:
        raise FileFormatError(f"{path}: {size - end} bytes after the last tensor; corrupt")
