"""References unpack large matrices by tiles: the same numbers, and memory of a few tiles."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from custom_kernels.checks import random_rows
from custom_kernels.dequant_gemv import Arena, Matrix, Scales, reference
from custom_kernels.ggml_blocks import F8_E4M3, format_by_name
from custom_kernels.slots import NO_SLOT, PAGE_BYTES


@pytest.fixture
def tiles(monkeypatch):
    """Call with the weights of a tile."""
    return lambda weights: monkeypatch.setattr(reference, "TILE_WEIGHTS", weights)


def _close(got: mx.array, want: mx.array) -> None:
    """Equal but for the order in which a library adds."""
    assert got.shape == want.shape and got.dtype == want.dtype
    np.testing.assert_allclose(np.array(got), np.array(want), rtol=2e-6, atol=2e-6 * float(mx.abs(want).max()))


@pytest.mark.parametrize(("name", "columns"), [("IQ2_XS", 512), ("Q8_0", 96), ("F8_E4M3", 300)])
def test_tiles_of_a_dense_matrix(tiles, name, columns):
    format = F8_E4M3 if name == "F8_E4M3" else format_by_name(name)
    rng, rows = np.random.default_rng(0), 391  # the last tile is short
    w = mx.array(random_rows(rng, format, rows, columns))
    scales = mx.array(rng.random((4, 3)).astype(np.float32)) if format.tile else None
    x = mx.random.normal((3, columns), key=mx.random.key(0))
    whole = reference.naive_block_gemv(x, w, format, scales=scales)
    unpacked = reference.naive_block_dequantize(w, format, mx.float32, scales)
    for weights in (1, 130 * columns, 390 * columns):
        tiles(weights)
        _close(reference.naive_block_gemv(x, w, format, scales=scales), whole)
        assert mx.array_equal(reference.naive_block_dequantize(w, format, mx.float32, scales), unpacked)
        one = reference.naive_block_gemv(x[1:2], w, format, scales=scales)
        assert mx.array_equal(one[0], reference.naive_block_gemv(x, w, format, scales=scales)[1])


def test_tiles_of_experts(tiles):
    rng = np.random.default_rng(1)
    gate = Matrix(format_by_name("Q8_0"), 24, 64, 0)
    down = Matrix(format_by_name("Q8_0"), 64, 32, 2 * 24 * gate.row_bytes)
    up = Matrix(gate.format, 24, 64, 24 * gate.row_bytes)
    records = np.zeros((6, PAGE_BYTES), dtype=np.uint8)
    for record in records:
        for matrix in (gate, up, down):
            packed = random_rows(rng, matrix.format, matrix.rows, matrix.columns).reshape(-1)
            record[matrix.offset : matrix.offset + packed.size] = packed
    arena = Arena((mx.array(records.reshape(-1)),))
    words = mx.array([[0, 5, NO_SLOT, 2, 1], [4, 4, 3, 0, NO_SLOT]], dtype=mx.uint32)
    x, h = mx.random.normal((2, 64)), mx.random.normal((2, 5, 32))
    calls = [
        lambda: reference.naive_expert_gate_up(x, words, arena, gate, up),
        lambda: reference.naive_expert_down(h, words, arena, down),
        lambda: reference.naive_expert_dequantize(words[0], arena, down),
    ]
    want = [call().astype(mx.float32) for call in calls]
    for weights in (1, 2 * 24 * 64, 3 * 64 * 32):
        tiles(weights)
        for call, whole in zip(calls, want, strict=True):
            _close(call().astype(mx.float32), whole)


def test_memory_of_a_product_is_that_of_a_few_tiles():
    """The whole matrix takes 205 MB unpacked, and unpacking it at once took 2.2 times as much."""
    format, x = format_by_name("Q8_0"), mx.random.normal((1, 2560))
    w = mx.zeros((20000, format.row_bytes(2560)), dtype=mx.uint8)
    mx.eval(w, x)
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    mx.eval(reference.naive_block_gemv(x, w, format))
    assert mx.get_peak_memory() - before < 205e6


def test_scales_of_tiles_are_those_of_their_rows(tiles):
    """Each expert's scales go with it."""
    matrix = Matrix(F8_E4M3, 130, 8, 0, Scales(1040, mx.float32))
    records = np.zeros((3, PAGE_BYTES), dtype=np.uint8)
    records[:, :1040] = 0x38  # 1.0
    records[:, 1040:1048] = np.array([[1, 2], [3, 4], [5, 6]], dtype=np.float32).view(np.uint8)
    arena = Arena((mx.array(records.reshape(-1)),))
    tiles(1)
    out = reference.naive_expert_dequantize(mx.array([2, 0, 1], dtype=mx.uint32), arena, matrix, mx.float32)
    assert np.array(out[:, [0, 129], 3]).tolist() == [[5, 6], [1, 2], [3, 4]]
