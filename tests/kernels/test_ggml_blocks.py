"""Block formats: sizes, tables, and dequantisers that agree with gguf-py to the last bit."""

from __future__ import annotations

import hashlib

import gguf
import mlx.core as mx
import numpy as np
import pytest
from gguf import quants

from custom_kernels.ggml_blocks import FORMATS, BlockFormat, format_by_id, format_by_name, naive_dequantize
from custom_kernels.ggml_blocks.reference import _DECODERS, _parity_signs
from custom_kernels.ggml_blocks.tables import GRIDS, IQ4_VALUES, grid_array

Q2_0 = format_by_name("Q2_0")
IN_GGUF = [format for format in FORMATS if format != Q2_0]  # gguf 0.19 has no Q2_0
SHA256 = {
    "IQ1_S": "07540ffc1aeaf6ad",
    "IQ2_XXS": "05826b5d3e472a3a",
    "IQ2_XS": "06e47aaca60b4dc1",
    "IQ2_S": "e1aa1473412b0552",
    "IQ3_XXS": "46e35f5a997efdee",
    "IQ3_S": "bd1af4945a1717c6",
}
"""The first 16 digits, over each grid as int8 [vectors, width], of what gguf 0.19.0 holds."""

every_format = pytest.mark.parametrize("format", FORMATS, ids=lambda format: format.name)


def _payload(format: BlockFormat, blocks: int = 1024, seed: int = 0) -> np.ndarray:
    """Random blocks in which every byte of the block takes each of its 256 values equally often.

    The scales' bytes too: half of the fp16 scales are negative, a sixteenth subnormal, infinite or NaN.
    """
    rng = np.random.default_rng([seed, format.type_id])
    bytes_ = np.tile(np.arange(256, dtype=np.uint8)[:, None], (blocks // 256, format.block_bytes))
    return rng.permuted(bytes_, axis=0)


def _rows(format: BlockFormat, *shape: int) -> np.ndarray:
    """Random payload [..., row_bytes] for weights of this shape."""
    blocks = int(np.prod(shape)) // format.block_weights
    payload = _payload(format, -(-blocks // 256) * 256)[:blocks]
    return payload.reshape(*shape[:-1], format.row_bytes(shape[-1]))


def _expected(payload: np.ndarray, format: BlockFormat) -> np.ndarray:
    """What the format means, by gguf-py or, for Q2_0, by its formula."""
    with np.errstate(all="ignore"):
        if format != Q2_0:
            return quants.dequantize(np.ascontiguousarray(payload), gguf.GGMLQuantizationType(format.type_id))
        blocks = payload.reshape(-1, 18)
        d = blocks[:, :2].copy().view(np.float16).astype(np.float32)
        codes = blocks[:, 2:].repeat(4, axis=1) >> np.tile(np.arange(0, 8, 2, dtype=np.uint8), 16) & 3
        return ((codes.astype(np.float32) - 1) * d).reshape(*payload.shape[:-1], -1)


def _assert_bit_equal(got: mx.array, want: np.ndarray, name: str) -> None:
    """Same dtype, shape and bits; of NaNs only the place is compared, since converting one may quieten it."""
    assert got.dtype == mx.float32 and want.dtype == np.float32, name
    found = np.array(got)
    assert found.shape == want.shape, f"{name}: {found.shape} instead of {want.shape}"
    same = (found.view(np.uint32) == want.view(np.uint32)) | (np.isnan(found) & np.isnan(want))
    assert same.all(), f"{name}: {(~same).sum()} of {same.size} weights differ, the first at {np.argwhere(~same)[0]}"


@every_format
def test_bit_equal_on_random_payload(format):
    payload = _payload(format)
    want = _expected(payload, format)
    assert np.isfinite(want).mean() > 0.9, "the payload shows too little"
    _assert_bit_equal(naive_dequantize(mx.array(payload), format), want, format.name)


@pytest.mark.parametrize("bits", [0x0000, 0x8000, 0x0001, 0x83FF, 0x0400, 0x7BFF, 0xFBFF, 0x7C00, 0xFC00, 0x7E00])
def test_scales_at_the_edges(bits):
    """Zeros, subnormals, the smallest and largest normals, infinities and NaN, in every format with an fp16 scale."""
    for format in FORMATS:
        payload = _payload(format, 256, seed=bits)
        if format.name == "IQ1_M":
            payload[:, 49::2] = payload[:, 49::2] & 15 | np.array([bits >> 4 * k & 15 for k in range(4)]) << 4
        elif format.block_weights > 1:
            at = 208 if format.name == "Q6_K" else 0
            payload[:, at : at + 2] = bits & 255, bits >> 8
        want = _expected(payload, format)
        _assert_bit_equal(naive_dequantize(mx.array(payload), format), want, f"{format.name}, scale {bits:#06x}")


@every_format
@pytest.mark.parametrize("width", [640, 256, 192])
def test_row_widths(format, width):
    if width % format.block_weights:
        with pytest.raises(
            ValueError, match=rf"{format.name}: a row width of {width} .* block's {format.block_weights}"
        ):
            format.row_bytes(width)
        return
    assert format.row_weights(format.row_bytes(width)) == width
    for shape in ((width,), (5, width), (2, 3, width), (2, 1, 3, width)):
        rows = _rows(format, *shape)
        want = _expected(rows, format)
        assert want.shape == shape
        _assert_bit_equal(naive_dequantize(mx.array(rows), format), want, f"{format.name} {shape}")


@every_format
def test_empty(format):
    row_bytes = format.row_bytes(512)
    for shape, want in {(0, row_bytes): (0, 512), (4, 0, row_bytes): (4, 0, 512), (3, 0): (3, 0)}.items():
        got = naive_dequantize(mx.zeros(shape, dtype=mx.uint8), format)
        assert got.shape == want and got.dtype == mx.float32


@every_format
def test_strided_input(format):
    payload = _rows(format, 6, 7, 256)
    want = _expected(payload, format)
    experts = mx.array(payload)
    _assert_bit_equal(naive_dequantize(experts[::2, 1::3], format), want[::2, 1::3], format.name)
    _assert_bit_equal(naive_dequantize(experts.swapaxes(0, 1), format), want.swapaxes(0, 1), format.name)
    record = mx.pad(experts.reshape(6, -1), [(0, 0), (3, 8)])  # rows at odd addresses inside a longer record
    inside = record[:, 3:-8].reshape(payload.shape)
    _assert_bit_equal(naive_dequantize(inside, format), want, format.name)
    across = mx.array(np.ascontiguousarray(payload.transpose(2, 0, 1))).transpose(1, 2, 0)  # byte-major
    _assert_bit_equal(naive_dequantize(across, format), want, format.name)


def test_refusals():
    format = format_by_name("IQ2_XS")
    with pytest.raises(ValueError, match="IQ2_XS: a row of bytes of 73 is not a multiple of the block's 74 bytes"):
        naive_dequantize(mx.zeros((2, 73), dtype=mx.uint8), format)
    with pytest.raises(ValueError, match=r"IQ2_XS: blocks must be .* uint8, not .*int8"):
        naive_dequantize(mx.zeros((2, 74), dtype=mx.int8), format)
    with pytest.raises(ValueError, match="IQ2_XS: blocks must be"):
        naive_dequantize(mx.array(1, dtype=mx.uint8), format)
    with pytest.raises(ValueError, match="a row width of -256"):
        format.row_bytes(-256)


def test_lookups():
    for format in FORMATS:
        assert format_by_name(format.name) is format and format_by_id(format.type_id) is format
    with pytest.raises(ValueError, match=r"block format 'Q3_K' is not supported \(supported: F32, .*Q2_0, F8_E4M3\)$"):
        format_by_name("Q3_K")
    with pytest.raises(ValueError, match=r"ggml type id 11 is not supported \(supported: 0 F32, .*42 Q2_0\)$"):
        format_by_id(11)


def test_the_table_agrees_with_gguf():
    assert {format.name for format in FORMATS} == _DECODERS.keys() - {"F8_E4M3"}
    assert (Q2_0.type_id, Q2_0.block_weights, Q2_0.block_bytes) == (42, 64, 18)
    for format in IN_GGUF:
        kind = gguf.GGMLQuantizationType[format.name]
        assert (kind.value, gguf.GGML_QUANT_SIZES[kind]) == (format.type_id, (format.block_weights, format.block_bytes))


@pytest.mark.parametrize("name", GRIDS)
def test_grids(name):
    grid = grid_array(name)
    assert hashlib.sha256(grid.tobytes()).hexdigest()[:16] == SHA256[name]
    theirs = quants._type_traits[gguf.GGMLQuantizationType[name]]
    theirs.init_grid()
    assert np.array_equal(grid, theirs.grid.reshape(theirs.grid_shape))
    assert not grid.flags.writeable


def test_small_tables():
    assert quants.IQ4_NL.kvalues == IQ4_VALUES
    stored = np.frombuffer(quants.IQ2_XXS.ksigns, dtype=np.uint8)
    want = 1 - 2 * np.unpackbits(stored[:, None], axis=1, bitorder="little").astype(np.float32)
    assert np.array_equal(np.array(_parity_signs(mx.arange(128, dtype=mx.uint32))), want)


def _finite_rows(format: BlockFormat, width: int) -> tuple[np.ndarray, mx.array]:
    """Blocks [rows, blocks per row, block_bytes] without infinite or NaN scales, and the scales, [rows, blocks]."""
    payload = _payload(format, 1280)
    d = payload[:, :2].copy().view(np.float16)[:, 0]
    blocks = width // format.block_weights
    rows = np.isfinite(d).sum() // blocks
    keep = np.flatnonzero(np.isfinite(d))[: rows * blocks]
    return payload[keep].reshape(rows, blocks, -1), mx.array(d[keep].astype(np.float32).reshape(rows, blocks))


def test_q2_0_is_mlx_affine_2_bit():
    """Equal in value: where w is zero and d negative, MLX's sum gives +0 and the product -0."""
    blocks, d = _finite_rows(Q2_0, 640)
    words = mx.array(blocks[..., 2:].reshape(len(blocks), -1).view(np.uint32))
    want = mx.dequantize(words, d, -d, group_size=64, bits=2)
    got = naive_dequantize(mx.array(blocks.reshape(len(blocks), -1)), Q2_0)
    assert got.shape == (len(blocks), 640) and mx.array_equal(got, want).item()


def test_q8_0_is_mlx_affine_8_bit():
    format = format_by_name("Q8_0")
    blocks, d = _finite_rows(format, 640)
    words = mx.array((blocks[..., 2:] ^ 0x80).reshape(len(blocks), -1).view(np.uint32))
    want = mx.dequantize(words, d, -128 * d, group_size=32, bits=8)
    got = naive_dequantize(mx.array(blocks.reshape(len(blocks), -1)), format)
    assert got.shape == (len(blocks), 640) and mx.array_equal(got, want).item()


def test_tensors_of_a_real_file(oracle):
    """Every tensor that llama.cpp's quantiser wrote, as stored."""
    seen = set()
    for tensor in gguf.GGUFReader(oracle / "IQ2_XS-IQ4_NL-Q8_0.gguf").tensors:
        format = format_by_id(int(tensor.tensor_type))
        stored = np.array(tensor.data).view(np.uint8)  # whole numbers come as their own dtype
        want = quants.dequantize(np.array(tensor.data), tensor.tensor_type)
        _assert_bit_equal(naive_dequantize(mx.array(stored), format), want, f"{tensor.name} ({format.name})")
        seen.add(format.name)
    assert {"IQ2_XS", "IQ4_NL", "Q8_0", "F32"} <= seen
