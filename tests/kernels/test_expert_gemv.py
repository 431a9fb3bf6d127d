"""Experts out of the arena: every slot word finds its record, null words read nothing, sums against float64."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import mlx.core as mx
import numpy as np
import pytest

from custom_kernels.dequant_gemv import (
    NO_SLOT,
    PAGE_BYTES,
    Arena,
    Matrix,
    expert_combine,
    expert_dequantize,
    expert_down,
    expert_gate_up,
)
from custom_kernels.dequant_gemv.expert_kernel import (
    expert_combine_launch,
    expert_dequantize_launch,
    expert_down_launch,
    expert_gate_up_launch,
    supports_experts,
)
from custom_kernels.dequant_gemv.reference import (
    naive_expert_combine,
    naive_expert_dequantize,
    naive_expert_down,
    naive_expert_gate_up,
)
from custom_kernels.dispatch import forced
from custom_kernels.ggml_blocks import format_by_name, naive_dequantize
from proof import EVERYWHERE, outputs
from test_block_gemv import activations, error_of, exact, packed

everywhere = pytest.mark.parametrize("where", EVERYWHERE)

_PAGES = [(0, 1), (2, 0), (1, 2), (0, 0), (3, 1), (1, 0)]
"""(chunk, place) of each expert; places are counted in records, so two records of a chunk lie side by side."""
_BASES = (0, 4096, 16, 16368)


@dataclass(frozen=True)
class Case:
    """Formats, the model's width and the experts' width."""

    gate: str
    up: str
    down: str
    hidden: int
    width: int


CASES = [
    Case("IQ2_XS", "IQ2_XS", "IQ4_NL", 256, 192),
    Case("Q2_0", "Q2_0", "Q2_0", 640, 192),
    Case("Q8_0", "BF16", "Q8_0", 192, 256),
    Case("IQ3_XXS", "Q4_K", "Q6_K", 256, 256),
    Case("IQ4_XS", "IQ4_NL", "IQ1_M", 256, 256),  # one table for both
]


class Layer:
    """Random experts and the arena they lie in; bytes outside the records are 255."""

    def __init__(self, case: Case):
        H, I = case.hidden, case.width
        self.gate = Matrix(format_by_name(case.gate), I, H)
        self.up = Matrix(format_by_name(case.up), I, H, I * self.gate.row_bytes + 4)  # nothing wider than words
        self.down = Matrix(format_by_name(case.down), H - 3, I, self.up.offset + I * self.up.row_bytes + 8)
        pages = -(-(self.down.offset + self.down.rows * self.down.row_bytes) // PAGE_BYTES)
        chunks = [np.full(base + 3 * pages * PAGE_BYTES + 5, 255, dtype=np.uint8) for base in _BASES]
        self.words, self.matrices = [], []
        for expert, (chunk, place) in enumerate(_PAGES):
            start = _BASES[chunk] + place * pages * PAGE_BYTES
            dense = []
            for part, m in enumerate((self.gate, self.up, self.down)):
                rows = packed(m.format, m.rows, m.columns, seed=3 * expert + part)
                chunks[chunk][start + m.offset :][: rows.size] = rows.reshape(-1)
                dense.append(exact(naive_dequantize(mx.array(rows), m.format)))
            self.words.append(chunk << 28 | place * pages)
            self.matrices.append(dense)
        self.arena = Arena(tuple(mx.array(chunk) for chunk in chunks), _BASES)

    def x(self, tokens: int, dtype: mx.Dtype = mx.float32) -> mx.array:
        """Activations at which gate x is about 1, where silu bends."""
        scale = 1 / (self.matrices[0][0].std() * self.gate.columns**0.5)
        return (activations(tokens, self.gate.columns) * float(scale)).astype(dtype)

    def words_of(self, ids: np.ndarray) -> mx.array:
        """Slot words of experts; -1 is none."""
        return mx.array(np.array([*self.words, NO_SLOT], dtype=np.uint32)[ids])

    def expected_h(self, x: mx.array, ids: np.ndarray) -> np.ndarray:
        """[T, k, I] float64."""
        out = np.zeros((*ids.shape, self.gate.rows))
        for (t, j), expert in np.ndenumerate(ids):
            if expert >= 0:
                g, u = (m @ exact(x[t]) for m in self.matrices[expert][:2])
                out[t, j] = g / (1 + np.exp(-g)) * u
        return out

    def expected_partials(self, h: mx.array, ids: np.ndarray) -> np.ndarray:
        """[T, k, N] float64."""
        out = np.zeros((*ids.shape, self.down.rows))
        for (t, j), expert in np.ndenumerate(ids):
            if expert >= 0:
                out[t, j] = self.matrices[expert][2] @ exact(h[t, j])
        return out


IDS = np.array(
    [[0, 1, 2], [3, -1, 4], [5, 5, 0], [-1, -1, -1], [2, 4, 1], [1, 0, -1], [4, 3, 5], [0, 1, 2]], dtype=np.int64
)
"""Of 8 tokens: repeated in a row and over rows, missing in part and all, every chunk."""


@cache
def layer_of(case: Case) -> Layer:
    """Built once."""
    return Layer(case)


@pytest.mark.sample(2)
@everywhere
@pytest.mark.parametrize("case", CASES, ids=str)
def test_against_float64(where, case):
    layer = layer_of(case)
    x, words = layer.x(8), layer.words_of(IDS)
    h = naive_expert_gate_up(x, words, layer.arena, layer.gate, layer.up)
    partials = naive_expert_down(h, words, layer.arena, layer.down)
    (h_kernel,) = outputs(expert_gate_up_launch(x, words, layer.arena, layer.gate, layer.up), where)
    (partials_kernel,) = outputs(expert_down_launch(h, words, layer.arena, layer.down), where)
    want_h, want_partials = layer.expected_h(x, IDS), layer.expected_partials(h, IDS)
    for name, got, want in [
        ("h, reference", h, want_h),
        ("h, kernel", h_kernel, want_h),
        ("partials, reference", partials, want_partials),
        ("partials, kernel", partials_kernel, want_partials),
    ]:
        error = error_of(got, want)
        assert got.dtype == mx.float32 and error < 1e-5, f"{name}: relative error {error:.1e}"
        assert not exact(got)[IDS < 0].any(), f"{name}: a missing expert gives something"


def _halves(layer: Layer, x: mx.array, words: mx.array, where: str) -> tuple[mx.array, mx.array]:
    """h, and the partials made of it, by the kernels."""
    (h,) = outputs(expert_gate_up_launch(x, words, layer.arena, layer.gate, layer.up), where)
    return h, outputs(expert_down_launch(h, words, layer.arena, layer.down), where)[0]


@pytest.mark.sample(1)
@everywhere
@pytest.mark.parametrize(
    ("case", "dtype"),
    [(CASES[0], mx.float32), (CASES[1], mx.bfloat16), (CASES[2], mx.float16)]
    + [pytest.param(case, dtype, marks=pytest.mark.full) for case in CASES[3:] for dtype in (mx.float32, mx.bfloat16)],
    ids=str,
)
def test_unpacked_experts_are_the_matrices(where, case, dtype):
    """Bit for bit, repeated and in any order, from every chunk; of NO_SLOT zeros."""
    layer = layer_of(case)
    ids = np.array([5, -1, 0, 1, 0, 4, 3, 2, -1])
    words = layer.words_of(ids)
    for part, matrix in enumerate((layer.gate, layer.up, layer.down)):
        want = np.stack([layer.matrices[i][part] * (i >= 0) for i in ids])
        want = mx.array(want.astype(np.float32)).astype(dtype)
        (got,) = outputs(expert_dequantize_launch(words, layer.arena, matrix, dtype), where)
        assert got.dtype == dtype and mx.array_equal(got, want), matrix
        assert mx.array_equal(naive_expert_dequantize(words, layer.arena, matrix, dtype), want), matrix


@pytest.mark.sample(1)
@everywhere
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16, mx.float16])
def test_a_pair_has_the_same_bits_in_every_window(where, dtype):
    layer = layer_of(CASES[0])
    x, words = layer.x(8, dtype), layer.words_of(IDS)
    whole = _halves(layer, x, words, where)
    error = error_of(whole[0], layer.expected_h(x, IDS))
    assert error < 1e-5, f"{dtype}: relative error {error:.1e}"
    for rows in (slice(7, 8), slice(2, 5)):
        for name, part, all_ in zip(("h", "partials"), _halves(layer, x[rows], words[rows], where), whole, strict=True):
            assert mx.array_equal(part, all_[rows]), f"{name} of tokens {rows} alone"


@everywhere
def test_resident_and_missing_experts_may_go_apart(where):
    """Each pair gets the same bits whichever of its fellows are missing; the rest are exact zeros."""
    layer = layer_of(CASES[0])
    x, words = layer.x(4), layer.words_of(IDS[:4])
    whole = _halves(layer, x, words, where)
    here = mx.array(IDS[:4] % 2 == 0)
    apart = [_halves(layer, x, mx.where(mask, words, NO_SLOT), where) for mask in (here, ~here)]
    assert all(mx.array_equal(a + b, c) for a, b, c in zip(*apart, whole, strict=True))


@pytest.mark.full
@everywhere
def test_rows_per_simdgroup_change_no_bit(where):
    layer = layer_of(CASES[0])
    x, words = layer.x(2), layer.words_of(IDS[:2])
    one, two, four = (
        outputs(expert_gate_up_launch(x, words, layer.arena, layer.gate, layer.up, rows=rows), where)[0]
        for rows in (1, 2, 4)
    )
    assert mx.array_equal(one, two) and mx.array_equal(four, two)


@everywhere
def test_odd_rows_at_the_end_of_a_chunk(where):
    """Rows that a simdgroup has no more of are not read: behind the last one the memory ends."""
    format = format_by_name("IQ4_NL")
    rows = packed(format, 10, 192)
    gate = Matrix(format, 5, 192)
    up = Matrix(format, 5, 192, PAGE_BYTES - rows.size // 2)
    chunk = np.full(PAGE_BYTES, 255, dtype=np.uint8)
    chunk[: rows.size // 2], chunk[up.offset :] = rows[:5].reshape(-1), rows[5:].reshape(-1)
    arena, words = Arena((mx.array(chunk),)), mx.zeros((1, 1), dtype=mx.uint32)
    x = activations(1, 192) * 0.1
    dense = exact(naive_dequantize(mx.array(rows), format)) @ exact(x[0])
    (h,) = outputs(expert_gate_up_launch(x, words, arena, gate, up), where)
    assert error_of(h[0, 0], dense[:5] / (1 + np.exp(-dense[:5])) * dense[5:]) < 1e-5
    (partials,) = outputs(expert_down_launch(x[:, None], words, arena, up), where)
    assert error_of(partials[0, 0], dense[5:]) < 1e-5


@everywhere
def test_chunks_may_be_rows_of_16_bytes(where):
    """As those of more than 2 GiB must be: MLX's axes end there."""
    layer = layer_of(CASES[0])
    x, words = layer.x(2), layer.words_of(IDS[:2])
    wide = tuple(chunk[: chunk.size // 16 * 16].reshape(-1, 16) for chunk in layer.arena.chunks)
    arena = Arena(wide, layer.arena.bases)
    want = naive_expert_gate_up(x, words, layer.arena, layer.gate, layer.up)
    assert mx.array_equal(naive_expert_gate_up(x, words, arena, layer.gate, layer.up), want)
    (flat,) = outputs(expert_gate_up_launch(x, words, layer.arena, layer.gate, layer.up), where)
    (h,) = outputs(expert_gate_up_launch(x, words, arena, layer.gate, layer.up), where)
    assert mx.array_equal(h, flat)


@everywhere
def test_one_chunk_and_one_pair(where):
    """The places of the other chunks are filled; base 0 by default."""
    layer = layer_of(CASES[0])
    arena, words = Arena(layer.arena.chunks[:1]), layer.words_of(IDS[:1, :1])
    x = layer.x(1)
    (h,) = outputs(expert_gate_up_launch(x, words, arena, layer.gate, layer.up), where)
    assert error_of(h, layer.expected_h(x, IDS[:1, :1])) < 1e-5
    assert (
        error_of(naive_expert_gate_up(x, words, arena, layer.gate, layer.up), layer.expected_h(x, IDS[:1, :1])) < 1e-5
    )


@pytest.mark.sample(1)
@everywhere
@pytest.mark.parametrize(("dtype", "limit"), [(mx.float32, 1e-6), (mx.bfloat16, 1e-2), (mx.float16, 1e-3)])
def test_combine_against_float64(where, dtype, limit):
    partials, weights = activations(8, 10, 301), activations(8, 10, seed=1)
    shared = activations(8, 301, dtype=dtype, seed=2)
    want = (exact(partials) * exact(weights)[..., None]).sum(axis=1) + exact(shared)
    (got,) = outputs(expert_combine_launch(partials, weights, shared), where)
    for name, out in {"kernel": got, "reference": naive_expert_combine(partials, weights, shared)}.items():
        error = error_of(out, want)
        assert out.dtype == dtype and error < limit, f"{name}: relative error {error:.1e}"
    for t in (slice(0, 1), slice(3, 6)):
        part = outputs(expert_combine_launch(partials[t], weights[t], shared[t]), where)[0]
        assert mx.array_equal(part, got[t]), f"tokens {t} alone"


@everywhere
def test_combine_adds_in_rank_order_and_casts_once(where):
    """1 vanishes beside 1e9 if and only if it is added before 1e9 goes; the shared expert comes last."""
    values = [[1e9, 1.0, -1e9], [1e9, -1e9, 1.0], [1.0, 1e9, -1e9]]
    partials = mx.array(values)[..., None] * mx.ones((1, 1, 9))
    weights, shared = mx.ones((3, 3)), mx.full((3, 9), 0.25)
    want = mx.array([[0.25], [1.25], [0.25]]) * mx.ones((1, 9))
    (got,) = outputs(expert_combine_launch(partials, weights, shared), where)
    assert mx.array_equal(got, want) and mx.array_equal(naive_expert_combine(partials, weights, shared), want)
    (narrow,) = outputs(expert_combine_launch(partials, weights, shared, mx.bfloat16), where)
    assert mx.array_equal(narrow, want.astype(mx.bfloat16))


def test_entries_fall_back_to_the_references():
    layer = layer_of(CASES[1])
    x, words = layer.x(2), layer.words_of(IDS[:2])
    with forced("reference"):
        h = expert_gate_up(x, words, layer.arena, layer.gate, layer.up)
        partials = expert_down(h, words, layer.arena, layer.down)
        out = expert_combine(partials, mx.full((2, 3), 0.25), mx.zeros((2, layer.down.rows)), mx.bfloat16)
        unpacked = expert_dequantize(words[0], layer.arena, layer.up, mx.float16)
    assert mx.array_equal(unpacked, naive_expert_dequantize(words[0], layer.arena, layer.up, mx.float16))
    assert mx.array_equal(h, naive_expert_gate_up(x, words, layer.arena, layer.gate, layer.up))
    assert mx.array_equal(partials, naive_expert_down(h, words, layer.arena, layer.down))
    assert out.dtype == mx.bfloat16 and error_of(out, layer.expected_partials(h, IDS[:2]).sum(axis=1) / 4) < 1e-2


@pytest.mark.parametrize("case", CASES[:2], ids=str)
def test_references_have_the_same_bits_in_every_window(case):
    layer = layer_of(case)
    x, words = layer.x(8, mx.bfloat16), layer.words_of(IDS)
    h = naive_expert_gate_up(x, words, layer.arena, layer.gate, layer.up)
    partials = naive_expert_down(h, words, layer.arena, layer.down)
    for t in (slice(0, 1), slice(2, 5)):
        assert mx.array_equal(naive_expert_gate_up(x[t], words[t], layer.arena, layer.gate, layer.up), h[t])
        assert mx.array_equal(naive_expert_down(h[t], words[t], layer.arena, layer.down), partials[t])


def test_refusals():
    layer = layer_of(CASES[0])
    x, words = layer.x(1), layer.words_of(IDS[:1])
    with pytest.raises(ValueError, match=r"gate is \[192, 256\] but up is \[253, 192\]"):
        expert_gate_up_launch(x, words, layer.arena, layer.gate, layer.down)
    with pytest.raises(ValueError, match=r"words is .*int32 \(1, 3\); needed: .*uint32"):
        expert_gate_up_launch(x, words.astype(mx.int32), layer.arena, layer.gate, layer.up)
    with pytest.raises(ValueError, match=r"h is .* \(1, 3, 5\); needed: any float \(1, 3, 192\)"):
        expert_down_launch(mx.zeros((1, 3, 5)), words, layer.arena, layer.down)
    with pytest.raises(ValueError, match="an arena has 5 chunks; allowed: 1 to 4"):
        Arena(layer.arena.chunks + layer.arena.chunks[:1])
    with pytest.raises(ValueError, match="2 bases for 4 chunks"):
        Arena(layer.arena.chunks, (0, 0))
    with pytest.raises(ValueError, match=r"chunk 0 is .*needed: flat uint8, a page after 4096"):
        Arena((mx.zeros(PAGE_BYTES, dtype=mx.uint8),), (4096,))
    with pytest.raises(ValueError, match="chunk 0 has its base at byte 2; allowed: multiples of 16"):
        Arena((mx.zeros(2 * PAGE_BYTES, dtype=mx.uint8),), (2,))
    assert supports_experts(words, layer.gate) and not supports_experts(words[:0], layer.gate)
    iq2, q4 = format_by_name("IQ2_XS"), format_by_name("Q4_K")
    assert supports_experts(words, Matrix(iq2, 2, 256, 2)) and not supports_experts(words, Matrix(iq2, 2, 256, 1))
    assert supports_experts(words, Matrix(q4, 2, 256, 4)) and not supports_experts(words, Matrix(q4, 2, 256, 2))


@pytest.mark.full
@pytest.mark.skipif(mx.default_device() == mx.Device(mx.cpu), reason="MLX runs on the CPU")
def test_records_beyond_4_gib():
    """Offsets into a chunk are 64-bit: the same record at the start of one chunk and past 4 GiB of another."""
    layer = layer_of(CASES[0])
    first = layer.arena.chunks[0]
    far = (1 << 32) // PAGE_BYTES + 3
    records = first[: first.size // 16 * 16].reshape(-1, 16)
    chunk = mx.concatenate([mx.zeros((far * PAGE_BYTES // 16, 16), dtype=mx.uint8), records])
    arena, x = Arena((first, chunk)), layer.x(1)
    words = mx.array([[layer.words[0], 1 << 28 | far + (layer.words[0] & 0x0FFFFFFF)]], dtype=mx.uint32)
    (h,) = outputs(expert_gate_up_launch(x, words, arena, layer.gate, layer.up), "gpu")
    (partials,) = outputs(expert_down_launch(h, words, arena, layer.down), "gpu")
    for name, pair in {"h": h[0], "partials": partials[0]}.items():
        assert mx.array_equal(pair[0], pair[1]) and mx.abs(pair).max() > 0, name
