"""A model of one or more GGUF files: its metadata, and tensors by name over all of them."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_moe.formats.gguf.header import Header, TensorPlace
from mlx_moe.formats.gguf.shards import read_shards
from mlx_moe.formats.safetensors import FileFormatError

_NUMBERS = {"F32": ("<f4", mx.float32), "F16": ("<f2", mx.float16), "BF16": ("<u2", mx.bfloat16)}
"""Formats that are arrays of numbers: how they are read, and their type."""


def open_gguf(source: str | os.PathLike[str] | Sequence[str | os.PathLike[str]]) -> GgufFile:
    """Open a model without reading any tensor; nothing stays open.

    Args:
        source: one of the model's files (its other shards are found beside it), its folder, or the list of its files.

    Raises FileFormatError, in one line, naming the file that is missing, damaged, or no part of the model.
    """
    return GgufFile(read_shards(source))


class GgufFile:
    """``metadata`` of the first shard, ``tensors`` of all, and ``paths`` in the order of the shards."""

    def __init__(self, shards: Sequence[Header]):
        tensors: dict[str, TensorPlace] = {}
        for shard in shards:
            for name, place in shard.tensors.items():
                if name in tensors:
                    raise FileFormatError(
                        f"{shard.path}: tensor {name[:120]!r} is also in {tensors[name].file}; download both again"
                    )
                tensors[name] = place
        self.paths: tuple[Path, ...] = tuple(shard.path for shard in shards)
        self.metadata: Mapping[str, Any] = MappingProxyType(shards[0].metadata)
        self.tensors: Mapping[str, TensorPlace] = MappingProxyType(tensors)

    def place(self, name: str) -> TensorPlace:
        """Where a tensor lies. Raises FileFormatError when the model has none of this name."""
        if name not in self.tensors:
            files = f"{self.paths[0]}" + (f" and {len(self.paths) - 1} more" if len(self.paths) > 1 else "")
            raise FileFormatError(f"{files}: tensor {name!r} is missing; the file is of another model or incomplete")
        return self.tensors[name]

    def read(self, name: str) -> mx.array:
        """A tensor, copied once from the file.

        Returns:
            F32, F16 and BF16 in their own type, of the tensor's shape; other formats as uint8 [..., row_bytes].

        Raises FileFormatError when there is no such tensor, its format is not supported, or the file has changed.
        """
        place = self.place(name)
        stored, dtype = _NUMBERS.get(place.format.name, ("|u1", mx.uint8))
        shape = place.shape if dtype != mx.uint8 else (*place.shape[:-1], place.row_bytes)
        array = mx.array(np.asarray(_mapped(place, np.dtype(stored))))
        return (array.view(dtype) if dtype == mx.bfloat16 else array).reshape(shape)


def _mapped(place: TensorPlace, dtype: np.dtype) -> np.memmap:
    """The tensor's bytes as a flat array that is paged in where it is used."""
    try:
        if place.file.stat().st_size < place.offset + place.size:  # mapping beyond the end would kill the process
            raise FileFormatError(f"{place.file}: became shorter since it was opened; open it again")
        return np.memmap(place.file, dtype, "r", place.offset, (place.size // dtype.itemsize,))
    except OSError as error:
        raise FileFormatError(f"{place.file}: cannot be read ({error.strerror or error})") from None
