"""Quantisers: errors at most ggml's, bytes that decode, every edge finite, the same rows the same bytes."""

from __future__ import annotations

import gguf
import mlx.core as mx
import numpy as np
import pytest
from gguf import quants

from custom_kernels.ggml_blocks import QUANTIZABLE, BlockFormat, format_by_name, naive_dequantize, quantize
from custom_kernels.ggml_blocks.quantize import entry, lattice
from custom_kernels.ggml_blocks.tables import grid_array

GGML_ERROR = {
    "IQ2_XXS": (0.3440, 0.2967),
    "IQ2_XS": (0.2998, 0.2588),
    "IQ2_S": (0.2491, 0.2252),
    "IQ3_XXS": (0.1820, 0.1534),
    "IQ4_NL": (0.0750, 0.0703),
    "Q8_0": (0.0055, 0.0055),
    "Q2_0": (0.3530, 0.3330),
}
"""Relative RMS errors of llama.cpp b11434's quantiser on ``_gaussian(64, 2560)``: with equal importances, and with
``_importance(2560)`` in the norm that these weight. For Q2_0, which ggml rounds naively (0.718), what a scale search
must reach."""

GGML_OTHER = {
    "IQ2_XXS": (0.3856, 0.4055, 0.3331, 0.4914),
    "IQ2_XS": (0.3299, 0.3407, 0.2856, 0.3957),
    "IQ2_S": (0.2974, 0.3049, 0.2303, 0.3696),
    "IQ3_XXS": (0.1961, 0.2028, 0.1734, 0.2259),
    "IQ4_NL": (0.0868, 0.0909, 0.0634, 0.1003),
    "Q8_0": (0.0068, 0.0073, 0.0039, 0.0085),
    "Q2_0": (0.4050, 0.4250, 0.3100, 0.4400),
}
"""The same for the matrices of ``_others``, equal importances. For Q2_0 bounds of our own."""

LATTICES = tuple(lattice.LATTICES)
each = pytest.mark.parametrize("format", [format_by_name(name) for name in QUANTIZABLE], ids=lambda format: format.name)


def _gaussian(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def _importance(*shape: int, seed: int = 1) -> np.ndarray:
    """Log-normal, as mean squared inputs are."""
    return np.exp(_gaussian(*shape, seed=seed))


def _decoded(packed: mx.array, format: BlockFormat) -> np.ndarray:
    return np.array(naive_dequantize(packed, format))


def _error(x: np.ndarray, got: np.ndarray, importance: np.ndarray | float = 1.0) -> float:
    x, got = x.astype(np.float64), got.astype(np.float64)
    return float(np.sqrt((importance * (x - got) ** 2).sum() / (importance * x**2).sum()))


def _quantized(x: np.ndarray, format: BlockFormat, importance: np.ndarray | None = None) -> mx.array:
    return quantize(mx.array(x), format, None if importance is None else mx.array(importance))


@each
def test_error_and_importance(format):
    x, h = _gaussian(64, 2560), _importance(2560)
    plain, weighted = _decoded(_quantized(x, format), format), _decoded(_quantized(x, format, h), format)
    bound, weighted_bound = GGML_ERROR[format.name]
    assert _error(x, plain) <= bound
    assert _error(x, weighted, h) <= weighted_bound
    if format.name != "Q8_0":
        assert _error(x, weighted, h) < 0.96 * _error(x, plain, h), "importances must pay"


def _others() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(3)
    return {
        "laplace": rng.laplace(size=(64, 1024)),
        "student": rng.standard_t(4, size=(64, 1024)),
        "uniform": rng.uniform(-1, 1, (64, 1024)),
        "columns of different size": rng.standard_normal((64, 1024)) * np.exp(0.7 * rng.standard_normal(1024)),
    }


@each
def test_other_distributions(format):
    for (name, x), bound in zip(_others().items(), GGML_OTHER[format.name], strict=True):
        x = x.astype(np.float32)
        error = _error(x, _decoded(_quantized(x, format), format))
        assert error <= bound, f"{name}: {error:.4f} and ggml has {bound}"


@each
@pytest.mark.parametrize("size", [1e-3, 1e4])
def test_size_does_not_matter(format, size):
    x = _gaussian(8, 2560)
    small = _error(x * size, _decoded(_quantized(x * np.float32(size), format), format))
    assert small <= 1.02 * _error(x, _decoded(_quantized(x, format), format))


def test_q8_0_is_ggml_rounding():
    format = format_by_name("Q8_0")
    x = np.concatenate([_gaussian(64, 640), np.round(_gaussian(64, 640) * 40) / 2, 3e4 * _gaussian(64, 640)])
    want = quants.quantize(x, gguf.GGMLQuantizationType.Q8_0)
    assert np.array_equal(np.array(_quantized(x, format)), want)
    assert np.array_equal(np.array(_quantized(x, format, _importance(640))), want), "importances change nothing"


@each
def test_bytes_are_what_gguf_reads(format):
    packed = _quantized(_gaussian(8, 512), format)
    assert packed.dtype == mx.uint8 and packed.shape == (8, format.row_bytes(512))
    if format.name != "Q2_0":  # gguf 0.19 has none
        want = quants.dequantize(np.array(packed), gguf.GGMLQuantizationType(format.type_id))
        assert np.array_equal(_decoded(packed, format), want)


@each
def test_decoded_weights_come_back(format):
    packed = _quantized(_gaussian(32, 2560), format)
    x = _decoded(packed, format)
    again = _quantized(x, format)
    assert _error(x, _decoded(again, format)) < 2e-3
    if format.name in ("Q8_0", "IQ4_NL"):
        assert mx.array_equal(again, packed).item(), "the bytes change"


def _edges(width: int) -> dict[str, np.ndarray]:
    spike, mixed = np.zeros(width), _gaussian(width)
    spike[width // 3] = -5.0
    mixed[::7] = 0
    steps = np.repeat(10.0 ** np.arange(-30, 34, 8), width // 8)
    return {
        "zeros": np.zeros(width),
        "minus zeros": -np.zeros(width),
        "ones": np.ones(width),
        "minus ones": -np.ones(width),
        "spike": spike,
        "some zeros": mixed,
        "subnormal floats": 1e-41 * mixed,
        "below fp16": 1e-10 * mixed,
        "subnormal fp16 scales": 1e-6 * mixed,
        "subnormal fp16": 1e-5 * mixed,
        "huge": 1e30 * mixed,
        "the largest": np.where(mixed > 0, 1, -1) * np.finfo(np.float32).max,
        "one huge": np.where(np.arange(width) == 5, 3e38, mixed),
        "all magnitudes": steps,
        "alternating": np.where(np.arange(width) % 2, 1.0, -1.0),
    }


@each
@pytest.mark.parametrize("weighted", [False, True], ids=["equal", "weighted"])
def test_edge_values(format, weighted):
    edges = _edges(512)
    x = np.array(list(edges.values())).astype(np.float32)
    h = None
    if weighted:
        h = _importance(*x.shape) * np.float32(1e30)
        h[:, ::3], h[3] = 0, 0
    got = dict(zip(edges, _decoded(_quantized(x, format, h), format), strict=True))
    reach = 65504 * entry._ENCODERS[format.name][1]
    for name, row in got.items():
        assert np.isfinite(row).all(), f"{name}: not finite"
        assert np.abs(row).max() <= reach, f"{name}: out of range"
    assert not any(got[name].any() for name in ("zeros", "minus zeros", "subnormal floats"))
    assert np.abs(got["below fp16"]).max() < 2e-7
    if not weighted:
        bounds = {"some zeros": 0.4, "subnormal fp16 scales": 0.7, "ones": 0.4, "minus ones": 0.4, "spike": 0.75}
        for name, bound in bounds.items():  # a spike costs grids much, since they have no zero
            assert _error(edges[name], got[name]) < bound, name
    huge = np.abs(got["the largest"])
    assert (np.abs(huge) >= reach / 2.01).mean() > 0.5, "huge weights must saturate"


@pytest.mark.parametrize("name", ["Q8_0", "Q2_0", "IQ4_NL"])
def test_constants(name):
    """One value is a level times some scale: fp16 rounds the scale, and Q8_0 subnormal scales up, so codes too."""
    format, tolerance = format_by_name(name), 1 / 254 if name == "Q8_0" else 2.0**-10
    for value in (1.0, -1.0, 0.3, -700.0, 3e-3):
        got = _decoded(_quantized(np.full((2, 64), value, dtype=np.float32), format), format)
        assert np.abs(got / value - 1).max() < tolerance, f"{name}: {value} became {got[0, 0]}"


@each
@pytest.mark.parametrize("shape", [(256,), (5, 256), (2, 3, 512), (2, 1, 3, 768), (3, 64), (7, 160)])
def test_shapes(format, shape):
    x = _gaussian(*shape)
    if shape[-1] % format.block_weights:
        with pytest.raises(ValueError, match=rf"{format.name}: a row width of {shape[-1]}"):
            _quantized(x, format)
        return
    packed = _quantized(x, format)
    assert packed.shape == (*shape[:-1], format.row_bytes(shape[-1]))
    alone = np.array([np.array(_quantized(row, format)) for row in x.reshape(-1, shape[-1])])
    assert np.array_equal(np.array(packed).reshape(alone.shape), alone), "a row alone has other bytes"


@pytest.mark.sample(1)
@each
def test_tiles_and_calls_give_the_same_bytes(format, monkeypatch):
    x, h = _gaussian(9, 1280), _importance(1280)
    want = _quantized(x, format, h)
    assert mx.array_equal(_quantized(x, format, h), want).item(), "two calls differ"
    for tile in (256, 1024, 3000, 1280 * 7):  # below a row, whole rows with a tail
        monkeypatch.setattr(entry, "_TILE", tile)
        assert mx.array_equal(_quantized(x, format, h), want).item(), f"tiles of {tile} differ"


@each
def test_empty(format):
    for shape in ((0, 512), (4, 0, 512), (3, 0)):
        packed = quantize(mx.zeros(shape), format)
        assert packed.shape == (*shape[:-1], format.row_bytes(shape[-1])) and packed.dtype == mx.uint8


@each
def test_dtypes_and_strides(format):
    x = mx.array(_gaussian(6, 8, 256))
    for dtype in (mx.bfloat16, mx.float16):
        rounded = x.astype(dtype)
        want = quantize(rounded.astype(mx.float32), format)
        assert mx.array_equal(quantize(rounded, format), want).item(), str(dtype)
    want = quantize(x, format)
    assert mx.array_equal(quantize(x[::2, 1::3], format), want[::2, 1::3]).item()
    assert mx.array_equal(quantize(x.swapaxes(0, 1), format), want.swapaxes(0, 1)).item()
    across = mx.array(np.ascontiguousarray(np.array(x).transpose(2, 0, 1))).transpose(1, 2, 0)
    assert mx.array_equal(quantize(across, format), want).item()


@pytest.mark.sample(1)
@each
def test_importance_shapes(format, monkeypatch):
    monkeypatch.setattr(entry, "_TILE", 1024)
    x, per_expert = _gaussian(3, 5, 512), _importance(3, 1, 512)
    want = np.array([np.array(_quantized(x[i], format, per_expert[i, 0])) for i in range(3)])
    assert np.array_equal(np.array(_quantized(x, format, per_expert)), want)
    full = np.ascontiguousarray(np.broadcast_to(per_expert, x.shape))
    assert np.array_equal(np.array(_quantized(x, format, full)), want)
    equal = np.array(_quantized(x, format))
    for h in (np.float32(3), np.ones((1, 1), np.float32), _importance(5, 1), np.zeros(512, np.float32)):
        assert np.array_equal(np.array(_quantized(x, format, h)), equal), f"importances {np.shape(h)} of equal weights"
    scaled = np.array(_quantized(x, format, per_expert * np.float32(2.0**40)))
    assert np.array_equal(scaled, want), "only ratios count"


@each
def test_unimportant_weights_stay_sensible(format):
    x, h = _gaussian(8, 512), _importance(512)
    h[256:] = 0
    got = _decoded(_quantized(x, format, h), format)
    assert _error(x[:, 256:], got[:, 256:]) <= 1.05 * GGML_ERROR[format.name][0]


def test_refusals():
    format = format_by_name("IQ2_XS")
    x = mx.zeros((2, 256))
    with pytest.raises(ValueError, match=r"Q4_K cannot be written \(supported: Q8_0, Q2_0, IQ4_NL, IQ2_XXS, .*\)"):
        quantize(x, format_by_name("Q4_K"))
    with pytest.raises(ValueError, match=r"IQ2_XS: weights must be .* floats, not .*int32"):
        quantize(x.astype(mx.int32), format)
    with pytest.raises(ValueError, match="IQ2_XS: weights must be"):
        quantize(mx.array(1.0), format)
    with pytest.raises(ValueError, match=r"importances must be floats, not .*int32"):
        quantize(x, format, mx.ones(256, dtype=mx.int32))
    for shape in ((255,), (3, 256), (1, 2, 256)):
        with pytest.raises(ValueError, match="do not broadcast to weights"):
            quantize(x, format, mx.ones(shape))


@each
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_values_that_are_no_numbers(format, bad):
    x, h = np.ones((2, 3, 256), np.float32), np.ones(256, np.float32)
    x[1, 2, 77], h[200] = bad, bad
    with pytest.raises(ValueError, match=f"{format.name}: weights hold NaN or infinity"):
        _quantized(x, format)
    for values in (h, np.where(h == 1, h, np.float32(-1))):
        with pytest.raises(ValueError, match=f"{format.name}: importances hold NaN, infinity or a negative number"):
            _quantized(np.ones((2, 256), np.float32), format, values)


@pytest.mark.parametrize("name", LATTICES)
def test_neighbours(name):
    """Every vector of the grid is the first neighbour of its own cells, and no cell has a neighbour twice."""
    shape = lattice.LATTICES[name]
    grid = grid_array(name).astype(np.float32)
    numbers = lattice._cell_numbers(mx.array(np.ascontiguousarray(grid.T)), 1.0, shape.cells)
    table = lattice._neighbours(shape)
    assert np.array_equal(np.array(table[numbers][:, 0]), np.arange(len(grid)))
    ordered = np.sort(np.array(table), axis=1)
    assert (ordered[:, 1:] > ordered[:, :-1]).all()


@pytest.mark.parametrize("name", LATTICES)
def test_nearest_against_all_vectors(name):
    """The neighbours kept lose next to nothing against the whole grid, and with importances little."""
    shape, grid = lattice.LATTICES[name], grid_array(name).astype(np.float32)
    y = np.abs(_gaussian(256, 32)) * 20
    for h, loss in ((np.ones_like(y), 1.005), (_importance(256, 32), 1.04)):
        index = np.array(lattice._nearest(mx.array(y), mx.array(h), mx.ones((256, 1)), shape))
        vectors, weights = y.reshape(-1, 1, grid.shape[1]), h.reshape(-1, 1, grid.shape[1])
        costs = (weights * (vectors - grid) ** 2).sum(axis=-1)
        assert costs[np.arange(len(index)), index].sum() <= loss * costs.min(axis=1).sum()


@pytest.mark.parametrize("name", LATTICES)
def test_signs(name):
    """Where parity forbids the signs, the weight of least importance * magnitude changes its own, and no other."""
    format, x, h = format_by_name(name), _gaussian(16, 512), _importance(512)
    changed = ((_decoded(_quantized(x, format, h), format) < 0) != (x < 0)).reshape(-1, 8)
    odd = (x < 0).reshape(-1, 8).sum(axis=1) % 2 == 1
    if not lattice.LATTICES[name].parity:
        assert not changed.any()
        return
    assert np.array_equal(changed.sum(axis=1), odd)
    assert np.array_equal(changed[odd].argmax(axis=1), (h * np.abs(x)).reshape(-1, 8)[odd].argmin(axis=1))


LIMIT_BYTES = (64 if mx.default_device() == mx.Device(mx.cpu) else 256) << 20  # a GPU has more pieces in flight


def _peak_bytes(rows: int, format: BlockFormat) -> int:
    """Memory at the peak beyond the weights, BF16 [rows, 2560], and the packed rows."""
    weights = mx.random.normal((rows, 2560), key=mx.random.key(0)).astype(mx.bfloat16)
    mx.eval(weights)
    quantize(weights[:1], format)  # tables
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    packed = quantize(weights, format, mx.ones(2560))
    return mx.get_peak_memory() - before - 2 * packed.nbytes


@pytest.mark.sample(1)
@each
def test_memory_is_bounded(format):
    assert _peak_bytes(400, format) < LIMIT_BYTES


@pytest.mark.full
@each
def test_matrices_of_real_size(format):
    assert _peak_bytes(8192, format) < LIMIT_BYTES
    for shape in ((1280, 2560), (2560, 640), (2560, 768)):
        if shape[1] % format.block_weights == 0:
            x, h = 0.02 * _gaussian(*shape), _importance(shape[1])
            assert _error(x, _decoded(_quantized(x, format), format)) <= GGML_ERROR[format.name][0]
            assert _error(x, _decoded(_quantized(x, format, h), format), h) <= GGML_ERROR[format.name][1]
