"""A minimal GGUF writer: small files for tests, and hostile ones, since every field can be given as it should not be.

``encode`` makes the bytes of one file, ``write_shards`` a model of several. Tensors are given as mx arrays: numbers in
their own type, or bytes [..., row_bytes] with the name of their block format.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np

from custom_kernels.ggml_blocks import BlockFormat, format_by_name

SCALARS = {
    "u8": 0,
    "i8": 1,
    "u16": 2,
    "i16": 3,
    "u32": 4,
    "i32": 5,
    "f32": 6,
    "bool": 7,
    "u64": 10,
    "i64": 11,
    "f64": 12,
}
_CODES = dict(zip(SCALARS, "BbHhIif?QqdX", strict=False))
STRING, ARRAY = 8, 9


class Typed(NamedTuple):
    """A metadata value of a given type: ``u16``, or ``[u16]`` for an array of such."""

    kind: str
    value: Any


class Tensor(NamedTuple):
    """A tensor as the file states it. ``offset`` None is the next aligned place."""

    dims: tuple[int, ...]  # ggml's order, the fastest first
    type_id: int
    data: bytes
    offset: int | None = None


def text(value: str | bytes) -> bytes:
    """A string field."""
    data = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(data)) + data


def typed(value: Any) -> bytes:
    """A metadata value with its type: whole numbers as u32 where they fit, sequences as arrays of one type."""
    if isinstance(value, bytes):  # as it is
        return value
    if isinstance(value, Typed):
        kind = value.kind.strip("[]")
        if value.kind == kind:
            return struct.pack(f"<I{_CODES[kind]}", SCALARS[kind], value.value)
        return struct.pack(
            f"<IIQ{len(value.value)}{_CODES[kind]}", ARRAY, SCALARS[kind], len(value.value), *value.value
        )
    if isinstance(value, str):
        return struct.pack("<I", STRING) + text(value)
    if isinstance(value, Sequence):
        elements = [typed(entry) for entry in value]
        kinds = {element[:4] for element in elements} or {struct.pack("<I", 4)}
        assert len(kinds) == 1, f"elements of several types: {value}"
        return (
            struct.pack("<I", ARRAY) + kinds.pop() + struct.pack("<Q", len(value)) + b"".join(e[4:] for e in elements)
        )
    kind = "bool" if isinstance(value, bool) else "f32" if isinstance(value, float) else "u32"
    return typed(Typed(kind, value))


def packed(array: mx.array | np.ndarray, format: str | None = None) -> Tensor:
    """A tensor from numbers, or from bytes of a block format."""
    array = mx.array(array) if isinstance(array, np.ndarray) else array
    if format is None:
        name = {mx.float32: "F32", mx.float16: "F16", mx.bfloat16: "BF16"}[array.dtype]
        stored = array.view(mx.uint16) if array.dtype == mx.bfloat16 else array
        return Tensor(tuple(reversed(array.shape)), format_by_name(name).type_id, np.array(stored).tobytes())
    block: BlockFormat = format_by_name(format)
    dims = (block.row_weights(array.shape[-1]), *reversed(array.shape[:-1]))
    return Tensor(dims, block.type_id, np.array(array).tobytes())


def encode(
    metadata: Mapping[str | bytes, Any] | Sequence[tuple[str | bytes, Any]],
    tensors: Mapping[str | bytes, Tensor] | Sequence[tuple[str | bytes, Tensor]] = (),
    *,
    version: int = 3,
    magic: bytes = b"GGUF",
    counts: tuple[int, int] | None = None,
    alignment: int = 32,
) -> bytes:
    """The bytes of one file; lists of pairs allow names to stand twice, ``counts`` (tensors, keys) may lie."""
    keys = list(metadata.items() if isinstance(metadata, Mapping) else metadata)
    infos = list(tensors.items() if isinstance(tensors, Mapping) else tensors)
    out = bytearray(magic + struct.pack("<IQQ", version, *(counts or (len(infos), len(keys)))))
    for key, value in keys:
        out += text(key) + typed(value)
    data = bytearray()
    for name, tensor in infos:
        data += bytes(-len(data) % alignment)
        offset = len(data) if tensor.offset is None else tensor.offset
        out += text(name) + struct.pack(
            f"<I{len(tensor.dims)}QIQ", len(tensor.dims), *tensor.dims, tensor.type_id, offset
        )
        data += tensor.data
    out += bytes(-len(out) % alignment)
    return bytes(out + data + bytes(-len(data) % alignment))


def shards(metadata: Mapping[str, Any], tensors: Mapping[str, Tensor], count: int) -> list[bytes]:
    """The files of a model in ``count`` shards; all metadata is in the first."""
    names = list(tensors)
    out = []
    for i in range(count):
        split = {
            "split.no": Typed("u16", i),
            "split.count": Typed("u16", count),
            "split.tensors.count": Typed("i32", len(names)),
        }
        part = names[i * len(names) // count : (i + 1) * len(names) // count]
        out.append(encode({**(metadata if i == 0 else {}), **split}, {name: tensors[name] for name in part}))
    return out


def write_shards(
    folder: Path, metadata: Mapping[str, Any], tensors: Mapping[str, Tensor], count: int, stem: str = "model"
) -> list[Path]:
    """Write a model as llama.cpp names its shards."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{stem}-{i + 1:05d}-of-{count:05d}.gguf" for i in range(count)]
    for path, content in zip(paths, shards(metadata, tensors, count), strict=True):
        path.write_bytes(content)
    return paths
