"""Projections, embeddings, norms and rotary positions shared by the blocks of a model.

In windows of up to ``WINDOW`` tokens products run one token at a time (``by_rows``, ``ExpertLinear``) or through ops
whose rows do not depend on each other (``block_gemv``), so that the result for a token does not depend on how many
tokens share its pass. (Matrix products choose their algorithm, and with it their rounding, by size.)
``tests/test_row_stability.py`` lists the functions that may multiply matrices.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from custom_kernels.dequant_gemv import block_dequantize, block_gemv
from custom_kernels.ggml_blocks import BlockFormat
from mlx_moe.cache import WINDOW


def by_rows(function: Callable[[mx.array], mx.array], x: mx.array) -> mx.array:
    """``function(x)`` for x [B, T, ...], one token at a time where 1 < T <= WINDOW."""
    T = x.shape[1]
    if T == 1 or T > WINDOW:
        return function(x)
    return mx.concatenate([function(x[:, t : t + 1]) for t in range(T)], axis=1)


def on_cpu() -> bool:
    """Whether MLX runs on the CPU, where packed products of many rows are slower than unpacking first."""
    return mx.default_device() == mx.Device(mx.cpu)


class PackedWeight(nn.Module):
    """A weight [..., out, in]: plain, packed by ``mx.quantize`` along its last axis, or rows of ggml blocks.

    Packed by MLX, it has ``scales`` and, in affine mode, ``biases`` beside a uint32 ``weight``. ``weight`` of blocks is
    uint8 [..., out, row_bytes].
    """

    def __init__(self, *shape: int):
        super().__init__()
        self.weight = mx.zeros(shape)
        self._packing: dict[str, Any] | None = None
        self._format: BlockFormat | None = None
        self._dtype = mx.float32

    @property
    def packing(self) -> dict[str, Any] | None:
        """``group_size``, ``bits`` and ``mode`` of a weight that MLX packed, else None."""
        return self._packing

    @property
    def format(self) -> BlockFormat | None:
        """What the bytes of a weight of ggml blocks mean, else None."""
        return self._format

    def pack(self, packing: dict[str, Any]) -> None:
        """Quantise in place. packing: ``group_size``, ``bits`` and ``mode`` of mx.quantize."""
        self._packing, self._dtype = dict(packing), self.weight.dtype
        self.weight, self.scales, *rest = mx.quantize(self.weight, **packing)
        if rest:
            self.biases = rest[0]

    def expect(self, packing: dict[str, Any], dtype: mx.Dtype) -> None:
        """Take on the shapes of a packed weight, whose values are loaded later and unpacked to ``dtype``.

        Raises ValueError for settings that mx.quantize does not know.
        """
        plain = mx.zeros((1, packing["group_size"] * 4))
        counts = [part.shape[-1] / plain.shape[-1] for part in mx.quantize(plain, **packing)]
        *lead, inputs = self.weight.shape
        self._packing, self._dtype = dict(packing), dtype
        for name, count in zip(("weight", "scales", "biases"), counts, strict=False):
            self[name] = mx.zeros((*lead, int(inputs * count)))

    def expect_blocks(self, format: BlockFormat, dtype: mx.Dtype) -> None:
        """Take on the shape of ggml blocks, whose bytes are loaded later and unpacked to ``dtype``.

        Raises ValueError for rows that are not whole blocks.
        """
        *lead, inputs = self.weight.shape
        self.weight = mx.zeros((*lead, format.row_bytes(inputs)), dtype=mx.uint8)
        self._format, self._dtype = format, dtype

    def dequantized(self, rows: mx.array | None = None) -> mx.array:
        """The plain weight, or the given rows of its first axis."""
        parts = [self[name] for name in ("weight", "scales", "biases") if name in self]
        parts = parts if rows is None else [part[rows] for part in parts]
        if self._format is not None:
            return block_dequantize(parts[0], self._format, self._dtype)
        return parts[0] if self._packing is None else mx.dequantize(*parts, dtype=self._dtype, **self._packing)


class Linear(PackedWeight):
    """y = x W^T without bias, x [B, T, in] -> [B, T, out]."""

    def __init__(self, inputs: int, outputs: int):
        super().__init__(outputs, inputs)

    def __call__(self, x: mx.array) -> mx.array:
        if self._format is not None and x.shape[1] <= WINDOW:
            return self._window(x)
        return by_rows(self._product, x)

    def _window(self, x: mx.array) -> mx.array:
        """Rows of a window, or of a batch of windows, ``WINDOW`` at a time, with ggml blocks."""
        rows = x.reshape(-1, x.shape[-1])
        parts = [block_gemv(rows[i : i + WINDOW], self.weight, self._format) for i in range(0, len(rows), WINDOW)]
        return (parts[0] if len(parts) == 1 else mx.concatenate(parts)).reshape(*x.shape[:-1], -1)

    def _product(self, x: mx.array) -> mx.array:
        if self._packing is None or (on_cpu() and x.shape[1] > WINDOW) or _cuda_is_wrong(x):
            return x @ self.dequantized().T
        return mx.quantized_matmul(x, self.weight, self.scales, self.get("biases"), transpose=True, **self._packing)


def _cuda_is_wrong(x: mx.array) -> bool:
    """Whether MLX's CUDA back end (0.32.4) gives NaN for packed products of x: several rows of 64 bfloat16 inputs."""
    return x.shape[-1] < 128 and x.size > x.shape[-1] and not on_cpu() and mx.cuda.is_available()


class ExpertLinear(PackedWeight):
    """One matrix per expert, [E, out, in]."""

    def __init__(self, experts: int, inputs: int, outputs: int):
        super().__init__(experts, outputs, inputs)

    def __call__(self, x: mx.array, ids: mx.array, sorted_ids: bool = False) -> mx.array:
        """x [N, ..., 1, in] with expert ids [N, ...] -> [N, ..., 1, out]: each row times the matrix of its expert.

        One entry of the first axis at a time, whatever their number, unless the ids are sorted (prompts).
        """
        if sorted_ids or len(ids) == 1:
            return self._gathered(x, ids, sorted_ids)
        return mx.concatenate([self._gathered(x[i : i + 1], ids[i : i + 1]) for i in range(len(ids))])

    def _gathered(self, x: mx.array, ids: mx.array, sorted_ids: bool = False) -> mx.array:
        if self._packing is None or (on_cpu() and sorted_ids):
            return gather_mm(x, self.dequantized().swapaxes(-1, -2), ids, sorted_ids)
        return mx.gather_qmm(
            x,
            self.weight,
            self.scales,
            self.get("biases"),
            rhs_indices=ids,
            transpose=True,
            sorted_indices=sorted_ids,
            **self._packing,
        )


def gather_mm(x: mx.array, weights: mx.array, ids: mx.array, sorted_ids: bool) -> mx.array:
    """x [N, ..., 1, in] times weights [E, in, out] of the ids [N, ...] -> [N, ..., 1, out]; ``sorted_ids``: ascending.

    This is mx.gather_mm, which on a CPU knows float32 only: there, few rows copy their matrices and many convert all.

    MLX's GPU kernels for sorted ids take the stride of the axis of length 1 for the distance between rows
    (ml-explore/mlx pull request 3960), and x[:, None] has any stride there; reshaping x gives it that of a row.
    """
    x = x.reshape(-1, x.shape[-1]).reshape(x.shape)
    if weights.dtype == mx.float32 or not on_cpu():
        return mx.gather_mm(x, weights, rhs_indices=ids, sorted_indices=sorted_ids)
    if not sorted_ids:
        return x @ weights[ids]
    wide = (part.astype(mx.float32) for part in (x, weights))
    return mx.gather_mm(*wide, rhs_indices=ids, sorted_indices=True).astype(x.dtype)


class Embedding(PackedWeight):
    """Rows of a table [rows, width] by id."""

    def __call__(self, ids: mx.array) -> mx.array:
        return self.dequantized(ids)


class RMSNorm(nn.Module):
    """x / rms(x) * w over the last axis, in float32, returned in x's type.

    ``groups`` > 1 normalises that many equal parts on their own. The stored weight is the factor itself: files that
    store w - 1 are converted when they are loaded. Zero-centred norms of the published model: transformers'
    ``Qwen4ExpTextRMSNorm``.
    """

    def __init__(self, dims: int, eps: float, groups: int = 1):
        super().__init__()
        self.weight = mx.ones((dims,))
        self._eps = eps
        self._groups = groups

    def __call__(self, x: mx.array) -> mx.array:
        if self._groups == 1:
            return mx.fast.rms_norm(x.astype(mx.float32), self.weight, self._eps).astype(x.dtype)
        parts = x.reshape(*x.shape[:-1], self._groups, -1).astype(mx.float32)
        parts = mx.fast.rms_norm(parts, None, self._eps).reshape(x.shape)
        return (parts * self.weight).astype(x.dtype)


class Rotary:
    """Rotary positions on the first ``dims`` dims, halves paired (i with i + dims / 2).

    Text needs one position per token, so the interleaved three-part form of the published model is plain here.
    """

    def __init__(self, dims: int, theta: float):
        self._dims = dims
        self._periods = mx.array([theta ** (i / dims) for i in range(0, dims, 2)], dtype=mx.float32)
        mx.eval(self._periods)

    def __call__(self, x: mx.array, start: int, step: int = 1) -> mx.array:
        """x [B, heads, T, D], token t at position (start + t) * step -> the same shape and type."""
        return mx.fast.rope(
            x, self._dims, traditional=False, base=None, scale=float(step), offset=start, freqs=self._periods
        )
