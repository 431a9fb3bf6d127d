"""F8_E4M3, whose scales lie apart: every code, every tile with its scale, and kernels that find both."""

from __future__ import annotations

import re
from functools import cache

import mlx.core as mx
import numpy as np
import pytest

from custom_kernels.dequant_gemv import (
    NO_SLOT,
    PAGE_BYTES,
    Arena,
    Matrix,
    Scales,
    block_dequantize,
    block_gemv,
    expert_dequantize,
    expert_down,
    expert_gate_up,
)
from custom_kernels.dequant_gemv.expert_kernel import (
    down_kernel,
    expert_dequantize_launch,
    expert_down_launch,
    expert_gate_up_launch,
    supports_experts,
)
from custom_kernels.dequant_gemv.kernel import block_dequantize_launch, block_gemv_launch, gemv_kernel
from custom_kernels.dequant_gemv.reference import (
    naive_block_dequantize,
    naive_block_gemv,
    naive_expert_dequantize,
    naive_expert_down,
    naive_expert_gate_up,
)
from custom_kernels.ggml_blocks import F8_E4M3, FORMATS, format_by_id, format_by_name, naive_dequantize
from custom_kernels.ggml_blocks.device import alignment, decoder_header
from metal_sim import needs_simulator, simulate
from proof import EVERYWHERE, outputs
from test_block_gemv import activations, error_of, exact, packed
from test_ggml_blocks import _assert_bit_equal

everywhere = pytest.mark.parametrize("where", EVERYWHERE)
both_dtypes = pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float32], ids=str)

SHAPES = [(1, 8), (128, 128), (37, 192), (130, 200), (300, 640)]
"""[N, K]: one tile, whole tiles, and tiles cut short on either side."""


def formula(codes: np.ndarray) -> np.ndarray:
    """What the codes stand for, by the definition of float8_e4m3fn, in float32."""
    sign, exponent, mantissa = codes >> 7, (codes >> 3 & 15).astype(np.int32), (codes & 7).astype(np.float32)
    size = np.where(exponent > 0, np.ldexp(8 + mantissa, exponent - 10), np.ldexp(mantissa, -9))
    return np.where(codes & 127 == 127, np.nan, np.where(sign, -size, size)).astype(np.float32)


def codes_of(*shape: int, seed: int = 0) -> np.ndarray:
    """Random codes, none of them NaN."""
    codes = np.random.default_rng([seed, 8]).integers(0, 256, shape, dtype=np.uint8)
    return codes - (codes & 127 == 127)


def scales_of(rows: int, columns: int, dtype: mx.Dtype, seed: int = 0) -> mx.array:
    """Between 0.001 and 0.004, of either sign."""
    rng, shape = np.random.default_rng([seed, 9]), F8_E4M3.scale_shape(rows, columns)
    values = rng.uniform(0.001, 0.004, shape) * rng.choice([-1, 1], shape)
    return mx.array(values.astype(np.float32)).astype(dtype)


def over_tiles(scales: mx.array, rows: int, columns: int) -> np.ndarray:
    """The scale of every weight [..., rows, columns], float32."""
    values = np.array(scales.astype(mx.float32))
    return values[..., np.arange(rows)[:, None] // 128, np.arange(columns) // 128]


def test_lookups():
    assert format_by_name("F8_E4M3") is F8_E4M3 and F8_E4M3 not in FORMATS
    assert F8_E4M3.row_bytes(200) == F8_E4M3.row_weights(200) == 200 and F8_E4M3.scale_shape(300, 640) == (3, 5)
    for type_id in (None, 43):
        with pytest.raises(ValueError, match="type id") as refusal:
            format_by_id(type_id)
        assert "F8" not in str(refusal.value)
    with pytest.raises(ValueError, match="Q8_0: the scales are in the blocks"):
        format_by_name("Q8_0").scale_shape(300, 640)


def test_every_code():
    codes = np.arange(256, dtype=np.uint8).reshape(2, 128)
    got = naive_dequantize(mx.array(codes), F8_E4M3, mx.ones((1, 1)))
    _assert_bit_equal(got, formula(codes), "F8_E4M3")
    assert np.isnan(np.array(got)).sum() == 2 and np.nanmax(np.array(got)) == 448.0


def test_every_code_by_torch():
    torch = pytest.importorskip("torch")
    codes = np.arange(256, dtype=np.uint8).reshape(2, 128)
    want = torch.from_numpy(codes).view(torch.float8_e4m3fn).to(torch.float32).numpy()
    _assert_bit_equal(naive_dequantize(mx.array(codes), F8_E4M3, mx.ones((1, 1))), want, "F8_E4M3")


@both_dtypes
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_each_tile_has_its_scale(shape, dtype):
    codes, scales = codes_of(*shape), scales_of(*shape, dtype)
    want = formula(codes) * over_tiles(scales, *shape)
    _assert_bit_equal(naive_dequantize(mx.array(codes), F8_E4M3, scales), want, str(shape))


def test_stacks_strides_and_nothing():
    codes = codes_of(3, 130, 200)
    scales = mx.stack([scales_of(130, 200, mx.float32, seed) for seed in range(3)])
    want = formula(codes) * over_tiles(scales, 130, 200)
    _assert_bit_equal(naive_dequantize(mx.array(codes), F8_E4M3, scales), want, "a stack")
    _assert_bit_equal(naive_dequantize(mx.array(codes)[::2], F8_E4M3, scales[::2]), want[::2], "every other")
    across = mx.array(np.ascontiguousarray(codes[0].T)).T
    _assert_bit_equal(naive_dequantize(across, F8_E4M3, scales[0]), want[0], "column by column")
    for shape in ((0, 200), (2, 0, 200), (0, 3, 200)):
        tiles = (*shape[:-2], *F8_E4M3.scale_shape(*shape[-2:]))
        got = naive_dequantize(mx.zeros(shape, dtype=mx.uint8), F8_E4M3, mx.ones(tiles))
        assert got.shape == shape and got.dtype == mx.float32


def test_refusals():
    codes, q8 = mx.zeros((130, 200), dtype=mx.uint8), format_by_name("Q8_0")
    for scales, given in [
        (None, "missing"),
        (mx.ones((1, 2)), r"mlx.core.float32 \(1, 2\)"),
        (mx.ones((2, 2), dtype=mx.float16), r"mlx.core.float16 \(2, 2\)"),
    ]:
        message = rf"F8_E4M3: the scales are {given}; needed: bfloat16 or float32 \(2, 2\)"
        with pytest.raises(ValueError, match=message):
            naive_dequantize(codes, F8_E4M3, scales)
        with pytest.raises(ValueError, match=message):
            block_gemv_launch(mx.zeros((1, 200)), codes, F8_E4M3, scales=scales)
        with pytest.raises(ValueError, match=message):
            block_dequantize_launch(codes, F8_E4M3, scales=scales)
    with pytest.raises(ValueError, match="since rows share scales"):
        naive_dequantize(codes[0], F8_E4M3, mx.ones((1, 2)))
    with pytest.raises(ValueError, match="Q8_0 takes no scales"):
        naive_dequantize(mx.zeros((2, 34), dtype=mx.uint8), q8, mx.ones((1, 1)))
    with pytest.raises(ValueError, match="a matrix in F8_E4M3 with scales None"):
        Matrix(F8_E4M3, 130, 200)
    with pytest.raises(ValueError, match=r"a matrix in Q8_0 with scales Scales\("):
        Matrix(q8, 2, 32, 0, Scales(128))
    with pytest.raises(ValueError, match=r"scales in mlx.core.float16; allowed"):
        Matrix(F8_E4M3, 130, 200, 0, Scales(26000, mx.float16))


# Kernels


def _odd_scales(rows: int, columns: int, dtype: mx.Dtype) -> mx.array:
    """Of every size below 2^120, subnormal, infinite and NaN ones among them."""
    bits = np.random.default_rng(5).integers(0, 1 << 32, F8_E4M3.scale_shape(rows, columns), dtype=np.uint32)
    bits = np.where((bits >> 23 & 255) >= 247, bits & 0x87FFFFFF, bits)
    bits.reshape(-1)[: min(4, bits.size - 1)] = [0x7F800000, 0x7FC00000, 0x00010000, 0x80000000][: bits.size - 1]
    return mx.array(bits.view(np.float32) if dtype == mx.float32 else (bits >> 16).astype(np.uint16)).view(dtype)


@pytest.mark.sample(2)
@everywhere
@both_dtypes
@pytest.mark.parametrize("shape", [(1, 8), (130, 200), (300, 640)], ids=str)
def test_the_decoder_is_bit_equal(where, shape, dtype):
    """Codes of every value in every place, NaN included; fewer than 8 scales lie in Metal's constant space."""
    codes = np.random.default_rng(3).permuted(np.arange(np.prod(shape)) % 256).astype(np.uint8).reshape(shape)
    blocks, scales = mx.array(codes), _odd_scales(*shape, dtype)
    (got,) = outputs(block_dequantize_launch(blocks, F8_E4M3, mx.float32, scales), where)
    _assert_bit_equal(got, np.array(naive_dequantize(blocks, F8_E4M3, scales)), f"{shape}")


@needs_simulator
def test_the_decoder_is_bit_equal_when_the_compiler_fuses():
    blocks, scales = mx.array(codes_of(130, 200)), scales_of(130, 200, mx.float32)
    launch = block_dequantize_launch(blocks, F8_E4M3, mx.float32, scales)
    (got,) = simulate(launch.kernel.metal, **launch.arguments, contract=True)
    _assert_bit_equal(got, np.array(naive_dequantize(blocks, F8_E4M3, scales)), "fused")


@everywhere
def test_dequantize_rounds_once(where):
    blocks, scales = mx.array(codes_of(130, 200)), scales_of(130, 200, mx.float32)
    (got,) = outputs(block_dequantize_launch(blocks, F8_E4M3, mx.bfloat16, scales), where)
    assert got.dtype == mx.bfloat16
    assert mx.array_equal(got, naive_block_dequantize(blocks, F8_E4M3, mx.bfloat16, scales))


@pytest.mark.sample(1)
@everywhere
@pytest.mark.parametrize(
    ("N", "K", "dtype"), [(37, 192, mx.bfloat16), (150, 640, mx.float32), (300, 200, mx.bfloat16)], ids=str
)
def test_gemv_against_float64(where, N, K, dtype):
    x, w, scales = activations(3, K), mx.array(codes_of(N, K)), scales_of(N, K, dtype)
    want = exact(x) @ (formula(np.array(w)).astype(np.float64) * over_tiles(scales, N, K)).T
    for name, got in {
        "kernel": outputs(block_gemv_launch(x, w, F8_E4M3, scales=scales), where)[0],
        "reference": naive_block_gemv(x, w, F8_E4M3, scales=scales),
    }.items():
        error = error_of(got, want)
        assert got.dtype == mx.float32 and error < 1e-5, f"{name}: relative error {error:.1e}"


@pytest.mark.sample(1)
@everywhere
@pytest.mark.parametrize(("K", "dtype"), [(640, mx.bfloat16), (192, mx.float16)], ids=str)
def test_a_row_has_the_same_bits_in_every_window(where, K, dtype):
    N = 150
    x, w, scales = activations(8, K, dtype=dtype), mx.array(codes_of(N, K)), scales_of(N, K, mx.bfloat16)
    (whole,) = outputs(block_gemv_launch(x, w, F8_E4M3, scales=scales), where)
    for rows in (slice(0, 1), slice(5, 8)):
        (part,) = outputs(block_gemv_launch(x[rows], w, F8_E4M3, scales=scales), where)
        assert mx.array_equal(part, whole[rows]), f"rows {rows} alone"
    for rows in (1, 4):
        (other,) = outputs(block_gemv_launch(x[:1], w, F8_E4M3, scales=scales, rows=rows), where)
        assert mx.array_equal(other, whole[:1]), f"{rows} rows per lane"


class Layer:
    """Random experts in two chunks; bytes outside the records are 255, NaN as codes and as scales.

    Gate has scales in BF16 at an odd multiple of 2, up and down in F32; the last scale ends where the chunk ends.
    """

    H, I = 640, 192
    BASES = (16, 4096)

    def __init__(self, up: str = "F8_E4M3"):
        H, I = self.H, self.I
        self.gate = Matrix(F8_E4M3, I, H, 4, Scales(I * H + 6))
        up_at = I * H + 64
        after = up_at + I * format_by_name(up).row_bytes(H)
        up_scales = Scales(after, mx.float32) if up == "F8_E4M3" else None
        self.up = Matrix(format_by_name(up), I, H, up_at, up_scales)
        down_at, tiles = after + 64, np.prod(F8_E4M3.scale_shape(H - 3, I))
        pages = -(-(down_at + (H - 3) * I + 4 * int(tiles)) // PAGE_BYTES)
        self.down = Matrix(F8_E4M3, H - 3, I, down_at, Scales(pages * PAGE_BYTES - 4 * int(tiles), mx.float32))
        chunks = [np.full(base + 2 * pages * PAGE_BYTES, 255, dtype=np.uint8) for base in self.BASES]
        self.words, self.dense = [], []
        for expert, (chunk, place) in enumerate([(1, 1), (0, 0), (1, 0)]):
            start = self.BASES[chunk] + place * pages * PAGE_BYTES
            matrices = enumerate((self.gate, self.up, self.down))
            self.dense.append([_write(chunks[chunk][start:], m, 3 * expert + part) for part, m in matrices])
            self.words.append(chunk << 28 | place * pages)
        self.arena = Arena(tuple(mx.array(chunk) for chunk in chunks), self.BASES)

    def words_of(self, ids: np.ndarray) -> mx.array:
        """Slot words of experts; -1 is none."""
        return mx.array(np.array([*self.words, NO_SLOT], dtype=np.uint32)[ids])


def _write(record: np.ndarray, m: Matrix, seed: int) -> np.ndarray:
    """Put a random matrix into the record; the weights in float64."""
    scales = None
    if m.scales:
        rows, scales = codes_of(m.rows, m.columns, seed=seed), scales_of(m.rows, m.columns, m.scales.dtype, seed)
        raw = np.array(scales.view(mx.uint8)).reshape(-1)
        record[m.scales.offset :][: raw.size] = raw
    else:
        rows = packed(m.format, m.rows, m.columns, seed)
    record[m.offset :][: rows.size] = rows.reshape(-1)
    return exact(naive_dequantize(mx.array(rows), m.format, scales))


@cache
def layer_of(up: str = "F8_E4M3") -> Layer:
    """Built once."""
    return Layer(up)


IDS = np.array([[0, 1, -1], [2, 2, 0], [-1, 1, 2]])
"""Of 3 tokens: repeated, missing, every chunk."""


@pytest.mark.sample(1)
@everywhere
@pytest.mark.parametrize("up", ["F8_E4M3", "Q8_0"])
def test_experts_against_float64(where, up):
    layer = layer_of(up)
    x, words = activations(3, layer.H) * 0.05, layer.words_of(IDS)
    want_h, want_partials = np.zeros((3, 3, layer.I)), np.zeros((3, 3, layer.H - 3))
    h = naive_expert_gate_up(x, words, layer.arena, layer.gate, layer.up)
    for (t, j), expert in np.ndenumerate(IDS):
        if expert >= 0:
            gate, up_, down = layer.dense[expert]
            g = gate @ exact(x[t])
            want_h[t, j] = g / (1 + np.exp(-g)) * (up_ @ exact(x[t]))
            want_partials[t, j] = down @ exact(h[t, j])
    for name, got, want in [
        ("h, reference", h, want_h),
        ("h", outputs(expert_gate_up_launch(x, words, layer.arena, layer.gate, layer.up), where)[0], want_h),
        ("partials, reference", naive_expert_down(h, words, layer.arena, layer.down), want_partials),
        ("partials", outputs(expert_down_launch(h, words, layer.arena, layer.down), where)[0], want_partials),
    ]:
        error = error_of(got, want)
        assert got.dtype == mx.float32 and error < 1e-5, f"{name}: relative error {error:.1e}"
        assert not exact(got)[IDS < 0].any(), f"{name}: a missing expert gives something"


@pytest.mark.sample(1)
@everywhere
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
def test_unpacked_experts_are_the_matrices(where, dtype):
    layer, ids = layer_of(), np.array([2, -1, 0, 1, 2])
    words = layer.words_of(ids)
    for part, matrix in enumerate((layer.gate, layer.down)):
        want = np.stack([layer.dense[i][2 * part] * (i >= 0) for i in ids]).astype(np.float32)
        want = mx.array(want).astype(dtype)
        (got,) = outputs(expert_dequantize_launch(words, layer.arena, matrix, dtype), where)
        assert got.dtype == dtype and mx.array_equal(got, want), matrix
        assert mx.array_equal(naive_expert_dequantize(words, layer.arena, matrix, dtype), want), matrix


@everywhere
def test_a_pair_has_the_same_bits_in_every_window(where):
    layer = layer_of()
    x, words = (activations(3, layer.H) * 0.05).astype(mx.bfloat16), layer.words_of(IDS)
    (h,) = outputs(expert_gate_up_launch(x, words, layer.arena, layer.gate, layer.up), where)
    (partials,) = outputs(expert_down_launch(h, words, layer.arena, layer.down), where)
    for t in (slice(0, 1), slice(2, 3)):
        (part,) = outputs(expert_gate_up_launch(x[t], words[t], layer.arena, layer.gate, layer.up, rows=1), where)
        assert mx.array_equal(part, h[t]), f"h of tokens {t} alone"
        (part,) = outputs(expert_down_launch(h[t], words[t], layer.arena, layer.down, rows=4), where)
        assert mx.array_equal(part, partials[t]), f"partials of tokens {t} alone"


def test_places_that_go_to_the_reference():
    words = mx.zeros((1, 1), dtype=mx.uint32)
    assert alignment(F8_E4M3) == 4
    for offset, scales, fits in [
        (4, Scales(26006), True),
        (2, Scales(26006), False),
        (4, Scales(26005), False),
        (4, Scales(26008, mx.float32), True),
        (4, Scales(26006, mx.float32), False),
    ]:
        assert supports_experts(words, Matrix(F8_E4M3, 130, 200, offset, scales)) == fits, (offset, scales)


def test_entries(simulated_gpu):
    """Kernels where they can, references where they cannot: stacks, widths that are not whole groups."""
    x, w, scales = activations(2, 192), mx.array(codes_of(37, 192)), scales_of(37, 192, mx.bfloat16)
    want = naive_block_gemv(x, w, F8_E4M3, scales=scales)
    assert error_of(block_gemv(x, w, F8_E4M3, scales=scales), exact(want)) < 1e-5
    dense = naive_block_dequantize(w, F8_E4M3, scales=scales)
    assert mx.array_equal(block_dequantize(w, F8_E4M3, scales=scales), dense)
    stack = block_dequantize(mx.stack([w, w]), F8_E4M3, scales=mx.stack([scales, scales]))
    assert mx.array_equal(stack, mx.stack([dense, dense]))
    narrow = block_gemv(x[:, :100], w[:, :100], F8_E4M3, scales=scales[:, :1])
    assert mx.array_equal(narrow, naive_block_gemv(x[:, :100], w[:, :100], F8_E4M3, scales=scales[:, :1]))
    layer = layer_of()
    x, words = activations(1, layer.H) * 0.05, layer.words_of(IDS[:1])
    h = expert_gate_up(x, words, layer.arena, layer.gate, layer.up)
    assert error_of(h, exact(naive_expert_gate_up(x, words, layer.arena, layer.gate, layer.up))) < 1e-5
    partials = expert_down(h, words, layer.arena, layer.down)
    assert error_of(partials, exact(naive_expert_down(h, words, layer.arena, layer.down))) < 1e-5
    unpacked = expert_dequantize(words[0], layer.arena, layer.gate)
    assert mx.array_equal(unpacked, naive_expert_dequantize(words[0], layer.arena, layer.gate))


def test_other_formats_pay_nothing():
    """Neither an input nor a word of code: what a kernel hands to ``scaled_w`` besides the group is never compiled."""
    for format in FORMATS:
        header = decoder_header(w=format)
        assert "#define scaled_w(q, scale) q\n" in header
        assert not re.search(r"\b(tile_|scale_at_|scaled_)\(", header), format.name
        assert "scales" not in gemv_kernel(format).inputs
    assert gemv_kernel(F8_E4M3).inputs == ("x", "w", "scales")
    assert down_kernel(F8_E4M3).inputs == down_kernel(format_by_name("Q8_0")).inputs
    both = decoder_header(gate=F8_E4M3, up=format_by_name("Q8_0"), down=F8_E4M3)
    assert both.count("FN size_t tile_(") == both.count("Group decode_F8_E4M3_(P row") == 1
