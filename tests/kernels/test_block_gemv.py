"""Device decoders, block_dequantize and block_gemv: bits against the reference, sums against float64."""

from __future__ import annotations

import re

import mlx.core as mx
import numpy as np
import pytest

from custom_kernels.checks import random_rows
from custom_kernels.dequant_gemv import block_dequantize, block_gemv
from custom_kernels.dequant_gemv.kernel import block_dequantize_launch, block_gemv_launch, lanes_per_row, supports
from custom_kernels.dequant_gemv.reference import naive_block_dequantize, naive_block_gemv
from custom_kernels.dispatch import forced
from custom_kernels.ggml_blocks import FORMATS, BlockFormat, format_by_name, naive_dequantize
from custom_kernels.ggml_blocks.device import decoder_header, has_decoder, table_arrays, table_names
from metal_sim import needs_simulator, simulate
from proof import EVERYWHERE, outputs
from test_ggml_blocks import _assert_bit_equal, _rows

every_format = pytest.mark.parametrize("format", FORMATS, ids=lambda format: format.name)
everywhere = pytest.mark.parametrize("where", EVERYWHERE)


def packed(format: BlockFormat, rows: int, columns: int, seed: int = 0) -> np.ndarray:
    """Rows [rows, row_bytes] uint8 of random payload whose fp16 scales lie between 0.005 and 0.02, of either sign."""
    return random_rows(np.random.default_rng([seed, format.type_id]), format, rows, columns)


def activations(*shape: int, dtype: mx.Dtype = mx.float32, seed: int = 0) -> mx.array:
    """Random activations, rounded to their dtype."""
    return mx.array(np.random.default_rng(seed).standard_normal(shape).astype(np.float32)).astype(dtype)


def exact(x: mx.array) -> np.ndarray:
    """As float64."""
    return np.array(x.astype(mx.float32)).astype(np.float64)


def error_of(got: mx.array, want: np.ndarray) -> float:
    """The largest difference in proportion to the largest value."""
    return float(np.abs(exact(got) - want).max() / np.abs(want).max())


def _width(format: BlockFormat) -> int:
    """640, else 768 for blocks of 256; three blocks and some lanes idle either way."""
    return 640 if 640 % format.block_weights == 0 else 768


@pytest.mark.sample(4)
@everywhere
@every_format
def test_decoders_are_bit_equal(where, format):
    """On every byte value in every place, infinite and NaN scales included."""
    blocks = mx.array(_rows(format, 19, _width(format)))
    (got,) = outputs(block_dequantize_launch(blocks, format, mx.float32), where)
    _assert_bit_equal(got, np.array(naive_dequantize(blocks, format)), format.name)


@pytest.mark.full
@needs_simulator
@every_format
def test_decoders_are_bit_equal_when_the_compiler_fuses(format):
    blocks = mx.array(_rows(format, 19, _width(format)))
    launch = block_dequantize_launch(blocks, format, mx.float32)
    (got,) = simulate(launch.kernel.metal, **launch.arguments, contract=True)
    _assert_bit_equal(got, np.array(naive_dequantize(blocks, format)), format.name)


@pytest.mark.sample(1)
@everywhere
@pytest.mark.parametrize(("name", "dtype"), [("IQ2_XS", mx.bfloat16), ("Q5_K", mx.bfloat16), ("Q8_0", mx.float16)])
def test_dequantize_rounds_once(where, name, dtype):
    format = format_by_name(name)
    for rows in (1, 9):
        blocks = mx.array(packed(format, rows, 256))
        (got,) = outputs(block_dequantize_launch(blocks, format, dtype), where)
        assert got.dtype == dtype and mx.array_equal(got, naive_block_dequantize(blocks, format, dtype)), name


@pytest.mark.sample(4)
@everywhere
@every_format
def test_gemv_against_float64(where, format):
    N, K = 37, next(k for k in (192, 640, 256) if k % format.block_weights == 0)
    x, w = activations(3, K), mx.array(packed(format, N, K))
    want = exact(x) @ exact(naive_dequantize(w, format)).T
    for name, got in {
        "kernel": outputs(block_gemv_launch(x, w, format), where)[0],
        "reference": naive_block_gemv(x, w, format),
    }.items():
        error = error_of(got, want)
        assert got.dtype == mx.float32 and error < 1e-5, f"{format.name}, {name}: relative error {error:.1e}"


WINDOWS = [
    ("IQ2_XS", 256, mx.float32),
    ("IQ2_XS", 768, mx.bfloat16),
    ("IQ4_NL", 192, mx.float16),
    ("Q8_0", 640, mx.bfloat16),
    ("BF16", 200, mx.bfloat16),
]


@pytest.mark.sample(2)
@everywhere
@pytest.mark.parametrize(("name", "K", "dtype"), WINDOWS, ids=str)
def test_a_row_has_the_same_bits_in_every_window(where, name, K, dtype):
    format, N = format_by_name(name), 37
    x, w = activations(8, K, dtype=dtype), mx.array(packed(format, N, K))
    (whole,) = outputs(block_gemv_launch(x, w, format), where)
    error = error_of(whole, exact(x) @ exact(naive_dequantize(w, format)).T)
    assert whole.dtype == dtype and error < (1e-5 if dtype == mx.float32 else 1e-2), f"relative error {error:.1e}"
    for rows in (slice(0, 1), slice(7, 8), slice(5, 8))[: 3 if name == "IQ2_XS" else 2]:
        (part,) = outputs(block_gemv_launch(x[rows], w, format), where)
        assert mx.array_equal(part, whole[rows]), f"{name} {dtype}: rows {rows} alone"
        assert mx.array_equal(naive_block_gemv(x[rows], w, format), naive_block_gemv(x, w, format)[rows])


@pytest.mark.full
@everywhere
def test_rows_per_simdgroup_change_no_bit(where):
    format = format_by_name("IQ2_XS")
    x, w = activations(3, 256), mx.array(packed(format, 37, 256))
    (want,) = outputs(block_gemv_launch(x, w, format), where)
    for rows in (1, 4):
        assert mx.array_equal(outputs(block_gemv_launch(x, w, format, rows=rows), where)[0], want), rows


@everywhere
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
def test_activations_may_start_anywhere(where, dtype):
    """A part of another array starts at any element; wide loads would fault there, and bits must not change."""
    format = format_by_name("IQ2_XS")
    whole, w = activations(3 * 256 + 1, dtype=dtype), mx.array(packed(format, 37, 256))
    own = mx.array(exact(whole[1:]).astype(np.float32)).astype(dtype)
    (want,) = outputs(block_gemv_launch(own.reshape(3, 256), w, format), where)
    (got,) = outputs(block_gemv_launch(whole[1:].reshape(3, 256), w, format), where)
    assert mx.array_equal(got, want)


@everywhere
def test_one_row_and_another_dtype(where):
    format = format_by_name("Q8_0")
    x, w = activations(1, 32, dtype=mx.bfloat16), mx.array(packed(format, 1, 32))
    (got,) = outputs(block_gemv_launch(x, w, format, mx.float32), where)
    want = exact(x) @ exact(naive_dequantize(w, format)).T
    assert got.dtype == mx.float32 and got.shape == (1, 1) and error_of(got, want) < 1e-5


def test_entries_fall_back_to_the_references():
    format = format_by_name("IQ4_NL")
    x, w = activations(2, 64, dtype=mx.bfloat16), mx.array(packed(format, 5, 64))
    with forced("reference"):
        assert mx.array_equal(block_gemv(x, w, format), naive_block_gemv(x, w, format))
        both = block_dequantize(mx.stack([w, w]), format)
    assert both.shape == (2, 5, 64) and both.dtype == mx.bfloat16


def test_sizes_that_go_to_the_reference():
    bf16, q8 = format_by_name("BF16"), format_by_name("Q8_0")
    assert supports(q8, 32, 1) and supports(bf16, 8, 5)
    assert not supports(bf16, 12, 5) and not supports(bf16, 0, 5) and not supports(q8, 32, 0)
    assert supports(bf16, 8, (1 << 31) - 1) and not supports(bf16, 16, 1 << 30)


def test_lanes_share_rows_so_that_few_are_idle():
    widths = {2560: 32, 640: 16, 192: 8, 64: 8, 256: 32, 80: 16, 8: 8, 1024: 32}
    assert {columns: lanes_per_row(columns) for columns in widths} == widths


def test_refusals():
    format = format_by_name("IQ2_XS")
    w = mx.array(packed(format, 2, 256))
    with pytest.raises(ValueError, match="1 to 8 rows of x, not 9"):
        block_gemv_launch(activations(9, 256), w, format)
    with pytest.raises(ValueError, match="rows of w have 74 bytes; 512 weights of IQ2_XS have 148"):
        block_gemv_launch(activations(1, 512), w, format)


def test_headers_hold_each_type_once_and_tables_are_kept():
    iq4, other, q8 = (format_by_name(name) for name in ("IQ4_NL", "IQ4_XS", "Q8_0"))
    assert all(has_decoder(format) for format in FORMATS)
    everything = decoder_header(**{format.name.lower(): format for format in FORMATS})
    assert not re.search(r"\b(?:auto|float|u?int|u?short) bits\b", everything), "hides a function of CUDA's prelude"
    text = decoder_header(gate=iq4, up=iq4)
    assert text.count("Group decode_IQ4_NL_") == 1 and "decode_up(row, group)" in text
    assert table_names(iq4, other, q8) == ["table_IQ4"]
    (table,) = table_arrays(other, iq4)
    assert table.size >= 8 and table is table_arrays(iq4)[0]
