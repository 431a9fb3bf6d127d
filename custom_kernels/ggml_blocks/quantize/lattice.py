"""Quantisers of the formats with grids, IQ2_XXS, IQ2_XS, IQ2_S and IQ3_XXS: w = d (s + 1/2) unit grid[index] sign.

A block is 256 weights. d is its fp16 scale, s a 4-bit scale of each run of 32 or 16 weights, an index stands for a
vector of 8 or 4 magnitudes, and each 8 weights have their signs, of which parity gives one where a format stores 7.

1. Signs are those of the weights; where their number must be even and is not, the weight with the least h |x| changes
   sign. The rest works on y = x sign, negative where it changed; h are the importances.
2. For some scales of each run take the vectors next to y / scale. Their least-squares scale (``fit``) that takes most
   off the error remains.
3. d and the s are fitted to the scales of the runs (``_split``), vectors are chosen anew among their neighbours with
   the importances, and d and the s fitted once more.

Neighbours come from a table: magnitudes fall into a few cells each, and the cells of a vector say which vectors of the
grid lie next to it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import mlx.core as mx
import numpy as np

from custom_kernels.ggml_blocks.quantize.fit import TINY, fit, half, half_bytes, join, reciprocal, word_bytes
from custom_kernels.ggml_blocks.tables import GRIDS, grid_array

NEIGHBOURS = 8
"""Vectors of the grid that are kept for each vector of cells, the nearest first."""


@dataclass(frozen=True)
class _Cells:
    """Cells of magnitudes: cell = (magnitude - first) / step, clipped and cut; ``centres`` stand for them."""

    first: float
    step: float
    centres: tuple[int, ...]

    @property
    def bits(self) -> int:
        return (len(self.centres) - 1).bit_length()


@dataclass(frozen=True)
class Lattice:
    """How one format uses its grid.

    Attributes:
        grid: name of the grid.
        run: weights that share a 4-bit scale.
        unit: what the scale's unit is of d.
        parity: whether 7 of 8 signs are stored.
        cells: cells of a magnitude, to find neighbours.
        pack: (d [N, 1] float32, s [N, 256 / run], index [N, 256 / width], signs [N, 32], uint32) -> [N, block_bytes].
    """

    grid: str
    run: int
    unit: float
    parity: bool
    cells: _Cells
    pack: Callable[[mx.array, mx.array, mx.array, mx.array], mx.array]

    @property
    def reach(self) -> float:
        """The largest magnitude of a weight, in units of d."""
        return 15.5 * self.unit * GRIDS[self.grid].levels[-1]


def encode(x: mx.array, h: mx.array, lattice: Lattice) -> mx.array:
    """x [N, 256] float32 within the format's range, h [N, 256] float32 > 0 -> [N, block_bytes] uint8."""
    signs, y = _signs(x.reshape(-1, 8), h.reshape(-1, 8), lattice.parity)
    y, h = y.reshape(-1, lattice.run), h.reshape(-1, lattice.run)
    scale, weight = _search(y, h, lattice)
    blocks = (x.shape[0], -1)
    d, s = _split(scale.reshape(blocks), weight.reshape(blocks), lattice.unit)
    index = _nearest(y, h, (d * lattice.unit * (s + 0.5)).reshape(-1, 1), lattice)
    scale, _, weight = fit(h * y, h, _grid(lattice.grid)[index].reshape(y.shape))
    d, s = _split(scale.reshape(blocks), weight.reshape(blocks), lattice.unit)
    return lattice.pack(d, s.astype(mx.uint32), index.reshape(blocks), signs.reshape(blocks))


def _signs(x: mx.array, h: mx.array, parity: bool) -> tuple[mx.array, mx.array]:
    """Groups [G, 8] -> their signs as bits [G] uint32, all 8, and x times the signs [G, 8]."""
    negative = x < 0
    if parity:
        odd = negative.sum(axis=-1, keepdims=True) & 1
        least = mx.argmin(h * mx.abs(x), axis=-1, keepdims=True)
        negative = negative ^ ((mx.arange(8) == least) & (odd == 1))
    bits = join(negative.astype(mx.uint32), 1, 8)
    return bits, x * (1 - 2 * negative.astype(mx.float32))


def _search(y: mx.array, h: mx.array, lattice: Lattice) -> tuple[mx.array, mx.array]:
    """The best scale of each run and its weight (``fit``), [runs, 1] both."""
    levels = GRIDS[lattice.grid].levels
    unit = mx.abs(y).max(axis=-1, keepdims=True) * (1 / levels[-1])
    y = y * reciprocal(unit)
    hy, columns, grid, nearest = h * y, _columns(y, lattice), _grid(lattice.grid), _nearest_only(lattice)
    best = mx.zeros_like(unit), mx.zeros_like(unit), mx.full(unit.shape, TINY)
    for factor in (*_FACTORS, *(level / levels[-1] for level in levels)):
        index = nearest[_cell_numbers(columns, factor, lattice.cells)]
        found = fit(hy, h, grid[index].reshape(y.shape))
        better = (found[0] > 0) & (found[1] > best[1])
        best = tuple(mx.where(better, new, old) for new, old in zip(found, best, strict=True))
    return best[0] * unit, best[2]


def _nearest(y: mx.array, h: mx.array, scale: mx.array, lattice: Lattice) -> mx.array:
    """The vectors of least error h (y / scale - g)^2: y, h [runs, run], scale [runs, 1] -> indices [vectors] uint32."""
    grid, y = _grid(lattice.grid), y * reciprocal(scale)
    candidates = _neighbours(lattice)[_cell_numbers(_columns(y, lattice), 1.0, lattice.cells)]
    width = grid.shape[1]
    twice, h = (2 * h * y).reshape(-1, width), h.reshape(-1, width)
    best, cost = candidates[:, 0], mx.full(len(candidates), mx.inf)
    for k in range(NEIGHBOURS):
        g = grid[candidates[:, k]]
        found = (g * (h * g - twice)).sum(axis=-1)
        best, cost = mx.where(found < cost, candidates[:, k], best), mx.minimum(found, cost)
    return best


def _split(scale: mx.array, weight: mx.array, unit: float) -> tuple[mx.array, mx.array]:
    """Scales of runs [N, S] and their weights to d [N, 1], which fp16 holds, and s [N, S], 0 to 15, all float32.

    Makes sum(weight (d unit (s + 1/2) - scale)^2) small. Candidates put the largest scale at one of the upper values of
    s, or between; each is refined by least squares.
    """
    scale = mx.maximum(scale, 0) / unit
    peak = scale.max(axis=-1, keepdims=True)
    best, cost = mx.zeros_like(peak), mx.full(peak.shape, mx.inf)
    for top in _TOPS:
        d = half(peak / top)
        d = half(fit(weight * scale, weight, _scale_codes(scale, d) + 0.5)[0])
        error = (weight * (d * (_scale_codes(scale, d) + 0.5) - scale) ** 2).sum(axis=-1, keepdims=True)
        best, cost = mx.where(error < cost, d, best), mx.minimum(error, cost)
    return best, _scale_codes(scale, best)


def _scale_codes(scale: mx.array, d: mx.array) -> mx.array:
    return mx.clip(mx.round(scale * reciprocal(d) - 0.5), 0, 15)


# Neighbours


def _columns(y: mx.array, lattice: Lattice) -> mx.array:
    """Vectors by component, [width, vectors]: sums over components and numbers per component run along memory."""
    return mx.contiguous(y.reshape(-1, GRIDS[lattice.grid].width).T)


def _cell_numbers(columns: mx.array, factor: float, cells: _Cells) -> mx.array:
    """The number of each vector's cells, first component lowest: magnitudes factor * [width, m] -> [m] uint32."""
    place = columns * (factor / cells.step) - cells.first / cells.step
    cell = mx.clip(place, 0, len(cells.centres) - 1).astype(mx.uint32)
    return (cell << (cells.bits * mx.arange(len(columns), dtype=mx.uint32)[:, None])).sum(axis=0)


@cache
def _grid(name: str) -> mx.array:
    return mx.array(grid_array(name).astype(np.float32))


@cache
def _neighbours(lattice: Lattice) -> mx.array:
    """By number of cells: the vectors nearest to the cells' centres, [cells^width, NEIGHBOURS] uint32.

    Distances are whole numbers below 2^24, exact in any order of adding; of equal ones the first comes first.
    """
    grid, cells = grid_array(lattice.grid).astype(np.float32), lattice.cells
    vectors, width = grid.shape
    centres, squares = np.array(cells.centres, dtype=np.float32), (grid * grid).sum(axis=1)
    rows = []
    for numbers in np.split(np.arange(1 << cells.bits * width), 16):
        digits = numbers[:, None] >> (cells.bits * np.arange(width)) & ((1 << cells.bits) - 1)
        keys = (squares - 2 * centres[digits] @ grid.T).astype(np.int32) * vectors + np.arange(vectors, dtype=np.int32)
        rows.append(np.sort(np.partition(keys, NEIGHBOURS, axis=1)[:, :NEIGHBOURS], axis=1) % vectors)
    return mx.array(np.concatenate(rows).astype(np.uint32))


@cache
def _nearest_only(lattice: Lattice) -> mx.array:
    return mx.array(np.array(_neighbours(lattice))[:, 0].copy())


# Bytes


def _pack_words(signs: mx.array, s: mx.array) -> mx.array:
    """Per 32 weights u7 sign[4], u4 s -> [N, 8] uint32."""
    return join(signs & 127, 7, 4) | (s << 28)


def _pack_iq2_xxs(d: mx.array, s: mx.array, index: mx.array, signs: mx.array) -> mx.array:
    words = word_bytes(_pack_words(signs, s)[..., None], 4)
    groups = mx.concatenate([index.astype(mx.uint8).reshape(-1, 8, 4), words], axis=-1)
    return mx.concatenate([half_bytes(d), groups.reshape(-1, 64)], axis=-1)


def _pack_iq2_xs(d: mx.array, s: mx.array, index: mx.array, signs: mx.array) -> mx.array:
    words = word_bytes(index | ((signs & 127) << 9), 2)
    return mx.concatenate([half_bytes(d), words, join(s, 4, 2).astype(mx.uint8)], axis=-1)


def _pack_iq2_s(d: mx.array, s: mx.array, index: mx.array, signs: mx.array) -> mx.array:
    parts = [index & 255, signs, join(index >> 8, 2, 4), join(s, 4, 2)]
    return mx.concatenate([half_bytes(d), *(part.astype(mx.uint8) for part in parts)], axis=-1)


def _pack_iq3_xxs(d: mx.array, s: mx.array, index: mx.array, signs: mx.array) -> mx.array:
    return mx.concatenate([half_bytes(d), index.astype(mx.uint8), word_bytes(_pack_words(signs, s), 4)], axis=-1)


# Cells are such that every vector of a grid is the first neighbour of its own. A factor scales a run whose largest
# weight is at the largest level: above 1 the best scale clips, below 1 the run uses lower levels only.
_TERNARY_CELLS = _Cells(6.75, 9.75, (8, 21, 31, 46))
_EIGHT_CELLS = _Cells(0.0, 8.0, (4, 12, 20, 28, 36, 44, 52, 62))
_FACTORS = (0.9, 1.12, 1.25, 1.4, 1.6, 1.85, 2.2)
_TOPS = (15.5, 15.0, 14.5, 13.5, 12.5)

LATTICES: dict[str, Lattice] = {
    "IQ2_XXS": Lattice("IQ2_XXS", 32, 0.25, True, _TERNARY_CELLS, _pack_iq2_xxs),
    "IQ2_XS": Lattice("IQ2_XS", 16, 0.25, True, _TERNARY_CELLS, _pack_iq2_xs),
    "IQ2_S": Lattice("IQ2_S", 16, 0.25, False, _TERNARY_CELLS, _pack_iq2_s),
    "IQ3_XXS": Lattice("IQ3_XXS", 32, 0.5, True, _EIGHT_CELLS, _pack_iq3_xxs),
}
