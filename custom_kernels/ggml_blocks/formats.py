"""The formats of packed weights, as facts: names, type ids, sizes. All but F8_E4M3 are ggml's block formats.

A quantised row is a run of blocks without padding, each a fixed number of bytes for a fixed number of weights; all
fields are little-endian. ``reference.py`` says what the bytes mean. Knows no MLX and no file.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class BlockFormat:
    """One block format.

    Attributes:
        name: ggml's name without prefix, as ``IQ2_XS``.
        type_id: the number of ``enum ggml_type``, which GGUF files store; None for what no GGUF holds.
        block_weights: weights per block.
        block_bytes: bytes per block.
        tile: the scales lie apart from the rows, one for each ``tile`` x ``tile`` weights; 0 if blocks hold their own.
    """

    name: str
    type_id: int | None
    block_weights: int
    block_bytes: int
    tile: int = 0

    def row_bytes(self, n: int) -> int:
        """Bytes of a row of ``n`` weights; rows are never padded, so the block must divide ``n``."""
        return self._blocks("a row width", n, self.block_weights, "weights") * self.block_bytes

    def row_weights(self, n_bytes: int) -> int:
        """Weights of a row of ``n_bytes`` bytes, the inverse of ``row_bytes``."""
        return self._blocks("a row of bytes", n_bytes, self.block_bytes, "bytes") * self.block_weights

    def scale_shape(self, rows: int, columns: int) -> tuple[int, int]:
        """The shape of the scales of a matrix [rows, columns], of a format whose scales lie apart."""
        if not self.tile:
            raise ValueError(f"{self.name}: the scales are in the blocks")
        return -(-rows // self.tile), -(-columns // self.tile)

    def _blocks(self, what: str, n: int, size: int, unit: str) -> int:
        if n < 0 or n % size:
            raise ValueError(f"{self.name}: {what} of {n} is not a multiple of the block's {size} {unit}")
        return n // size


FORMATS: tuple[BlockFormat, ...] = (
    BlockFormat("F32", 0, 1, 4),
    BlockFormat("F16", 1, 1, 2),
    BlockFormat("Q5_1", 7, 32, 24),
    BlockFormat("Q8_0", 8, 32, 34),
    BlockFormat("Q4_K", 12, 256, 144),
    BlockFormat("Q5_K", 13, 256, 176),
    BlockFormat("Q6_K", 14, 256, 210),
    BlockFormat("IQ2_XXS", 16, 256, 66),
    BlockFormat("IQ2_XS", 17, 256, 74),
    BlockFormat("IQ3_XXS", 18, 256, 98),
    BlockFormat("IQ1_S", 19, 256, 50),
    BlockFormat("IQ4_NL", 20, 32, 18),
    BlockFormat("IQ3_S", 21, 256, 110),
    BlockFormat("IQ2_S", 22, 256, 82),
    BlockFormat("IQ4_XS", 23, 256, 136),
    BlockFormat("IQ1_M", 29, 256, 56),
    BlockFormat("BF16", 30, 1, 2),
    BlockFormat("Q2_0", 42, 64, 18),
)
"""Every supported format of ggml, by type id. Each has one decoder in ``reference.py``, like ``F8_E4M3``."""

F8_E4M3 = BlockFormat("F8_E4M3", None, 1, 1, tile=128)
"""float8_e4m3fn with scales in BF16 or F32, as ``weight`` and ``weight_scale_inv`` of FP8 checkpoints."""

_BY_NAME = {format.name: format for format in (*FORMATS, F8_E4M3)}
_BY_ID = {format.type_id: format for format in FORMATS}


def format_by_name(name: str) -> BlockFormat:
    """The format called ``name`` (``"IQ2_XS"``); ValueError names the value and the supported ones."""
    if name not in _BY_NAME:
        raise ValueError(f"block format {name!r} is not supported (supported: {', '.join(_BY_NAME)})")
    return _BY_NAME[name]


def format_by_id(type_id: int) -> BlockFormat:
    """The format with this ggml type id (17 for IQ2_XS); ValueError names the value and the supported ones."""
    if type_id not in _BY_ID:
        supported = ", ".join(f"{format.type_id} {format.name}" for format in FORMATS)
        raise ValueError(f"ggml type id {type_id!r} is not supported (supported: {supported})")
    return _BY_ID[type_id]
