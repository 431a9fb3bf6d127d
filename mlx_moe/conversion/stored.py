"""Matrices where they lie in a file: read by rows, as they are or as numbers."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx
import numpy as np

from custom_kernels.ggml_blocks import BlockFormat, format_by_name, naive_dequantize
from mlx_moe.formats.safetensors import FileFormatError
from mlx_moe.models.qwen4_exp.gguf_names import Packed
from mlx_moe.models.qwen4_exp.sanitize import FP8_BLOCK

FP8 = "F8_E4M3"
BAND_WEIGHTS = 1 << 20
"""Weights that are numbers at one time: a few tens of MB with everything made of them."""
_NUMBERS = {"F32": (np.float32, mx.float32), "F16": (np.float16, mx.float16), "BF16": (np.uint16, mx.bfloat16)}


@dataclass(frozen=True)
class Stored:
    """A matrix [rows, columns] in a file, its rows one after the other.

    Attributes:
        file, offset: of its first byte.
        shape: (rows, columns) in weights.
        format: name of the block format, or FP8.
        scale: of an FP8 matrix: one number for all, or one per 128 x 128 weights.
        first_row: which row of the matrix that ``scale`` belongs to is row 0 here.
    """

    file: Path
    offset: int
    shape: tuple[int, int]
    format: str
    scale: Stored | None = None
    first_row: int = 0

    @property
    def row_bytes(self) -> int:
        """Bytes of one row."""
        return self.shape[1] if self.format == FP8 else format_by_name(self.format).row_bytes(self.shape[1])

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return self.shape[0] * self.row_bytes

    def read_into(self, target: np.ndarray, start: int = 0) -> None:
        """Fill a contiguous uint8 array with whole rows, from row ``start`` on."""
        view, at = memoryview(target).cast("B"), self.offset + start * self.row_bytes
        try:
            handle = os.open(self.file, os.O_RDONLY)
            try:
                while len(view):
                    count = os.preadv(handle, [view], at)
                    if count == 0:
                        raise FileFormatError(f"{self.file}: became shorter since it was opened; open it again")
                    view, at = view[count:], at + count
            finally:
                os.close(handle)
        except OSError as error:
            raise FileFormatError(f"{self.file}: cannot be read ({error.strerror or error})") from None

    def raw(self, start: int, stop: int) -> np.ndarray:
        """Rows as bytes, uint8 [stop - start, row_bytes]."""
        out = np.empty((stop - start, self.row_bytes), dtype=np.uint8)
        self.read_into(out, start)
        return out

    def numbers(self, start: int, stop: int) -> mx.array:
        """Rows as numbers [stop - start, columns]: of their own type, or float32 where they are packed."""
        raw = self.raw(start, stop)
        if self.format == FP8:
            return mx.from_fp8(mx.array(raw), dtype=mx.float32) * self._scales(start, stop)
        if self.format in _NUMBERS:
            kind, dtype = _NUMBERS[self.format]
            return mx.array(raw.view(kind)).view(dtype)
        return naive_dequantize(mx.array(raw), format_by_name(self.format))

    def packed(self, start: int, stop: int) -> Packed:
        """Rows as a weight's contents: numbers (of FP8 too), or blocks as uint8."""
        if self.format == FP8:
            return Packed(self.numbers(start, stop), format_by_name("F32"))
        form = format_by_name(self.format)
        return Packed(self.numbers(start, stop) if is_plain(self.format) else mx.array(self.raw(start, stop)), form)

    def bands(self, start: int = 0, weights: int = BAND_WEIGHTS) -> Iterator[tuple[int, int]]:
        """Ranges of rows from ``start`` on, of about so many weights each."""
        step = max(1, weights // max(self.shape[1], 1))
        for first in range(start, self.shape[0], step):
            yield first, min(first + step, self.shape[0])

    def _scales(self, start: int, stop: int) -> mx.array:
        scale = self.scale.numbers(0, self.scale.shape[0]).astype(mx.float32)
        if scale.size == 1:
            return scale.reshape(())
        rows = mx.array((self.first_row + np.arange(start, stop)) // FP8_BLOCK)
        columns = mx.array(np.arange(self.shape[1]) // FP8_BLOCK)
        return scale[rows][:, columns]


def encoded(numbers: mx.array, format: BlockFormat) -> np.ndarray:
    """Numbers in a format that is plain numbers, as bytes, uint8 [rows, row_bytes]."""
    kind, dtype = _NUMBERS[format.name]
    numbers = numbers.astype(dtype)
    stored = numbers.view(mx.uint16) if kind is np.uint16 else numbers
    return np.array(stored).view(np.uint8).reshape(numbers.shape[0], -1)


def is_plain(format: str) -> bool:
    """Whether the format is an array of numbers."""
    return format in _NUMBERS
