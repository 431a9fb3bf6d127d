"""No false alarms: kernels that mlx-lm ships for Macs pass, and agree with mlx-lm's own reference of each.

mlx-lm launches threadgroups of more than 256 threads and cut grids in places, so the strict launch rules are off.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from types import ModuleType

import mlx.core as mx
import mlx.nn as nn
import pytest

from metal_sim import load_copy, metal_on_cpu, needs_simulator

pytestmark = needs_simulator

# Relative to the largest element of the reference
TOLERANCE = {mx.float32: 2e-5, mx.float16: 4e-3, mx.bfloat16: 3e-2}
DTYPES = pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16], ids=["float16", "bfloat16"])


@pytest.fixture(scope="module")
def launched() -> Iterator[list[str]]:
    """Names of the kernels launched so far, on the simulator. References run op by op: fusing them is g++'s work."""
    mx.disable_compile()
    try:
        with metal_on_cpu(strict_launch=False) as names:
            yield names
    finally:
        mx.enable_compile()


@pytest.fixture(autouse=True)
def launches_a_kernel(launched) -> Iterator[None]:
    """Each test must launch a kernel, not slip into a fallback."""
    mx.random.seed(0)
    before = len(launched)
    yield
    assert len(launched) > before, "no kernel was launched"


@lru_cache
def _copy(name: str) -> ModuleType | None:
    try:
        return load_copy(f"mlx_lm.{name}")
    except ModuleNotFoundError:
        return None


def load(name: str) -> ModuleType:
    """A copy of an mlx-lm module whose kernels run on the simulator."""
    return _copy(name) or pytest.skip(f"this mlx-lm has no {name}")


def normal(*shape: int, dtype: mx.Dtype = mx.float32, scale: float = 1.0) -> mx.array:
    return (mx.random.normal(shape) * scale).astype(dtype)


def check(name: str, got: mx.array, expected: mx.array, dtype: mx.Dtype) -> None:
    assert got.shape == expected.shape, name
    got, expected = got.astype(mx.float32), expected.astype(mx.float32)
    error = (mx.abs(got - expected).max() / mx.abs(expected).max()).item()
    assert error <= TOLERANCE[dtype], f"{name}: error {error:.2e} of the largest element"


@pytest.mark.sample(1)
@DTYPES
@pytest.mark.parametrize("gate", ["scalar", "vector"])
@pytest.mark.parametrize("masked", [False, True], ids=["unmasked", "masked"])
def test_gated_delta(dtype, gate, masked):
    gd = load("models.gated_delta")
    q, k = (normal(1, 5, 2, 128, dtype=dtype, scale=0.1) for _ in range(2))
    v, beta = normal(1, 5, 4, 128, dtype=dtype), mx.random.uniform(0, 1, (1, 5, 4)).astype(dtype)
    g = mx.random.uniform(0.8, 1, (1, 5, 4, 128) if gate == "vector" else (1, 5, 4))
    state = normal(1, 4, 128, 128, scale=0.1)
    mask = mx.array([[True, True, False, True, True]]) if masked else None
    y, last = gd.gated_delta_kernel(q, k, v, g, beta, state, mask)
    expected_y, expected_last = gd.gated_delta_ops(q, k, v, g, beta, state, mask)
    if masked:  # the reference computes the outputs of masked tokens, the kernel leaves them zero
        expected_y = mx.where(mask[..., None, None], expected_y, 0)
    check("y", y, expected_y, dtype)
    check("state", last, expected_last, mx.float32)


def test_gated_delta_packed_is_the_explicit_tree():
    """mlx-lm promises that these two kernels agree bit for bit."""
    gd = load("models.gated_delta")
    q, k = (normal(1, 3, 2, 128, scale=0.1) for _ in range(2))
    call = (q, k, normal(1, 3, 4, 128), mx.random.uniform(0.8, 1, (1, 3, 4)), mx.random.uniform(0, 1, (1, 3, 4)))
    state = normal(1, 4, 128, 128, scale=0.1)
    for packed, tree in zip(
        gd.gated_delta_kernel(*call, state), gd.gated_delta_kernel_xtree(*call, state), strict=True
    ):
        assert mx.array_equal(packed, tree)


@pytest.mark.sample(1)
@DTYPES
def test_ssm(dtype):
    ssm = load("models.ssm")
    x, step = normal(1, 1, 8, 64, dtype=dtype), normal(1, 1, 8, dtype=dtype)
    b, c = (normal(1, 1, 2, 128, dtype=dtype) for _ in range(2))
    call = (x, normal(8), b, c, normal(8), step, normal(8), normal(1, 8, 64, 128), (0.001, 100.0))
    for name, got, expected in zip(("y", "state"), ssm.ssm_update_kernel(*call), ssm.ssm_attn(*call), strict=True):
        check(name, got, expected, dtype)


def test_wkv7():
    rwkv = load("models.rwkv7")
    r, w, k, v, a, b = (normal(1, 4, 2, 64, scale=0.1) for _ in range(6))
    state = normal(1, 2, 64, 64)
    y, last = rwkv.wkv7_kernel(r, w, k, v, a, b, state)
    rows = []
    for t in range(4):
        row, state = rwkv._wkv7_step_ops(r[:, t], w[:, t], k[:, t], v[:, t], a[:, t], b[:, t], state)
        rows.append(row[..., 0])
    check("y", y, mx.stack(rows, axis=1), mx.float32)
    check("state", last, state, mx.float32)


def test_bitlinear():
    layer = load("models.bitlinear_layers").BitLinear(256, 64, bias=False)
    codes = mx.random.randint(0, 3, (64, 256))  # 0, 1, 2 stand for -1, 0, 1; a byte holds one code of each quarter
    quarters = codes.reshape(4, 16, 256)
    packed = sum(quarters[i] << (2 * i) for i in range(4)).astype(mx.uint8)
    x = normal(2, 256)
    y = layer.execute_matmul_kernel(x, packed)
    check("y", y, x @ (codes.astype(mx.float32) - 1).T, mx.float32)


def test_sinkhorn():
    model = load("models.deepseek_v41")
    comb, eps = mx.random.uniform(0.1, 1, (5, 4, 4)), mx.array([1e-6])
    (y,) = model._sinkhorn_kernel(
        inputs=[comb, eps],
        template=[("HC", 4), ("ITERS", 3)],
        grid=(5, 1, 1),
        threadgroup=(5, 1, 1),
        output_shapes=[comb.shape],
        output_dtypes=[mx.float32],
    )
    check("y", y, model._sinkhorn(comb, iters=3, eps=eps), mx.float32)


@pytest.mark.sample(1)
@DTYPES
def test_attention_residual(dtype):
    model = load("models.kimi_k3")
    blocks, size, threads = 3, 700, 512
    raw, partial = normal(blocks, 2, size, dtype=dtype), normal(2, size, dtype=dtype)
    inverse, weights, eps = mx.random.uniform(0.5, 1, (blocks, 2)), normal(size, scale=0.1), 1e-5
    (y,) = model._attn_res_kernel(
        inputs=[raw, inverse, partial, weights, mx.array([eps]), 2],
        template=[("InT", dtype), ("K", blocks), ("D", size), ("THREADS", threads)],
        grid=(threads, 2, 1),
        threadgroup=(threads, 1, 1),
        output_shapes=[partial.shape],
        output_dtypes=[dtype],
    )
    check("y", y, model._attn_res_combine(raw, inverse, partial, weights, eps), dtype)


@pytest.mark.sample(1)
@DTYPES
def test_qk_norm(dtype):
    x = normal(1, 3, 12 * 128, dtype=dtype)
    heads = x.reshape(1, 3, 12, 128)
    q, k = mx.fast.rms_norm(heads[:, :, :4], None, 1e-5) * 0.5, mx.fast.rms_norm(heads[:, :, 4:6], None, 1e-5)
    call = dict(n_heads=4, n_kv_heads=2, head_dim=128, eps=1e-5, query_scale=0.5)
    for name, got, expected in zip("qk", load("kernels.qk_norm").qk_norm(x, **call), (q, k), strict=False):
        check(name, got, expected, dtype)

    def rope(a: mx.array) -> mx.array:
        turned = mx.fast.rope(a.transpose(0, 2, 1, 3), 128, traditional=True, base=10000.0, scale=1.0, offset=7)
        return turned.transpose(0, 2, 1, 3)

    rotated = load("kernels.qk_norm_rope").qk_norm_rope(x, rope_base=10000.0, offset=7, **call)
    for name, got, expected in zip("qk", rotated, (rope(q), rope(k)), strict=False):
        check(f"roped {name}", got, expected, dtype)


@pytest.mark.sample(1)
@DTYPES
def test_norm_add_norm(dtype):
    kernels = load("kernels.norm_add_norm")
    branch, stream, alpha, beta = normal(3, 512, dtype=dtype), normal(3, 512), normal(512), normal(512)
    norm = nn.RMSNorm(512, eps=1e-5)
    norm.weight = normal(512, dtype=dtype)
    new, normed = kernels.norm_add_norm(
        branch, stream, alpha=alpha, beta=beta, post_weight=normal(512, dtype=dtype), post_eps=1e-5, next_norm=norm
    )
    assert mx.array_equal(normed, kernels.pre_norm(new, norm, dtype=dtype))  # mlx-lm's promise


@pytest.mark.sample(1)
@DTYPES
def test_post_expert_norm_combine(dtype):
    experts, weights, scale = normal(3, 4, 512, dtype=dtype), normal(3, 4), normal(512, dtype=dtype)
    y = load("kernels.post_expert_norm_combine").post_expert_norm_combine(experts, weights, norm_weight=scale, eps=1e-5)
    scaled = experts.astype(mx.float32) * scale.astype(mx.float32)
    check("y", y, (mx.fast.rms_norm(scaled, None, 1e-5) * weights[..., None]).sum(axis=1), dtype)


@pytest.mark.sample(1)
@DTYPES
def test_rms_norm_sigmoid_gate(dtype):
    x, gate = normal(1, 3, 4, 128, dtype=dtype), normal(1, 4, 384, dtype=dtype)
    y = load("kernels.rms_norm_sigmoid_gate").rms_norm_sigmoid_gate(x, gate, eps=1e-5)
    normed = mx.fast.rms_norm(x, None, 1e-5).transpose(0, 2, 1, 3).reshape(1, 4, 384)
    check("y", y, normed * mx.sigmoid(gate), dtype)


def test_expert_routing():
    logits = normal(6, 64)
    experts, weights = load("kernels.expert_routing").expert_routing(
        logits, mx.zeros(64), top_k=4, multiplier=1.0, score_eps=1e-20, route_scale=2.5
    )
    top = mx.argpartition(-logits, 4, axis=-1)[:, :4]
    assert mx.array_equal(mx.sort(experts.astype(mx.int32), axis=-1), mx.sort(top.astype(mx.int32), axis=-1))
    check("weights", weights.sum(axis=-1), mx.full((6,), 2.5), mx.float32)
