"""Right kernels pass, with the numbers they should give; plausible mistakes in one of them do not."""

from __future__ import annotations

import re
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from metal_sim import MetalError, Schedule, needs_simulator, simulate, verify

pytestmark = needs_simulator

SHARED = "threadgroup float s[128]; s[l] = x[i]; "
BARRIER = "threadgroup_barrier(mem_flags::mem_threadgroup); "
X = np.arange(256, dtype=np.float32)
IN_GROUPS = X.reshape(2, 128)
IN_SIMDS = X.reshape(8, 32)

# name: (body, header, other arguments of run_body, expected output)
CASES: dict[str, tuple[str, str, dict[str, Any], np.ndarray]] = {
    "a literal without suffix": ("o[i] = x[i] * 0.5;", "", {}, X / 2),
    "explicit bfloat": ("o[i] = static_cast<T>(x[i] * 2.0f);", "", {"dtype": mx.bfloat16}, 2 * X),
    "implicit half": ("o[i] = x[i] * 2.0f;", "", {"dtype": mx.float16}, 2 * X),
    "a table in the constant space": (
        "o[i] = tab[i & 3];",
        "constant float tab[4] = {1, 2, 3, 4};\n",
        {},
        np.tile(np.float32([1, 2, 3, 4]), 64),
    ),
    "a small input in the constant space": (
        "o[i] = f(table) + x[i];",
        "inline float f(constant const float* p) { return p[3]; }\n",
        {"table": 4},
        X + 3,
    ),
    "a renamed address space": (
        f"SHARED float s[128]; s[l] = x[i]; {BARRIER} o[i] = s[127 - l];",
        "#define SHARED threadgroup\n",
        {},
        IN_GROUPS[:, ::-1].ravel(),
    ),
    "a barrier": (f"{SHARED}{BARRIER} o[i] = s[127 - l];", "", {}, IN_GROUPS[:, ::-1].ravel()),
    "a barrier within a SIMD-group": (
        f"{SHARED} simdgroup_barrier(mem_flags::mem_threadgroup); o[i] = s[l ^ 1];",
        "",
        {},
        X.reshape(-1, 2)[:, ::-1].ravel(),
    ),
    "simd_sum": ("o[i] = simd_sum(x[i]);", "", {}, IN_SIMDS.sum(1).repeat(32)),
    "simd_max": ("o[i] = simd_max(x[i]);", "", {}, IN_SIMDS.max(1).repeat(32)),
    "a shuffle down": (
        "o[i] = simd_shuffle_down(x[i], 1);",
        "",
        {},
        np.minimum(IN_SIMDS + 1, IN_SIMDS.max(1, keepdims=True)).ravel(),
    ),
    "a prefix sum": ("o[i] = simd_prefix_inclusive_sum(x[i]);", "", {}, IN_SIMDS.cumsum(1).ravel()),
    "a ballot": ("o[i] = popcount((ulong)simd_ballot(x[i] < 40));", "", {}, np.float32([32, 8] + 6 * [0]).repeat(32)),
    "divergence without meeting points": (
        "if (i & 1) { o[i] = x[i]; } else { o[i] = -x[i]; }",
        "",
        {},
        X * (-1) ** (X + 1),
    ),
    "a whole SIMD-group that skips simd_sum": (
        "float v = 0; if (l < 32) { v = simd_sum(x[i]); } o[i] = v;",
        "",
        {},
        np.where(X % 128 < 32, IN_SIMDS.sum(1).repeat(32), 0),
    ),
    "integer atomics": (
        "threadgroup atomic_int sum; if (l == 0) atomic_store_explicit(&sum, 0, memory_order_relaxed);"
        f"{BARRIER} atomic_fetch_add_explicit(&sum, (int)x[i], memory_order_relaxed); {BARRIER}"
        "o[i] = atomic_load_explicit(&sum, memory_order_relaxed);",
        "",
        {},
        IN_GROUPS.sum(1).repeat(128),
    ),
    "vectors": (
        "float4 v = ((device const float4*)x)[i / 4]; half2 h = half2(v.xy); o[i] = dot(v, float4(1)) - h.x - h.y;",
        "",
        {},
        X.reshape(-1, 4)[:, 2:].sum(1).repeat(4),
    ),
    "as_type": ("o[i] = as_type<float>(as_type<uint>(x[i]) | 0x80000000u);", "", {}, -X),
    "structs copied from device memory": (
        "device const Pair* pairs = (device const Pair*)x; Pair p = pairs[i / 2]; o[i] = p.a + p.b;",
        "struct Pair { float a; float b; };\n",
        {},
        X.reshape(-1, 2).sum(1).repeat(2),
    ),
    "helpers that differ in the address space": (
        f"{SHARED}{BARRIER} o[i] = f(x + i) + f(s + l);",
        "inline float f(device const float* p) { return *p; }\ninline float f(threadgroup float* p) { return *p; }\n",
        {},
        2 * X,
    ),
    "init_value": ("if (i & 1) o[i] = x[i];", "", {"init_value": 7}, np.where(X % 2, X, 7)),
    "a cut grid, where asked for": (
        "o[i] = x[i];",
        "",
        {"grid": (200, 1, 1), "strict_launch": False, "output_shapes": [(200,)]},
        X[:200],
    ),
}


@pytest.mark.sample(5)
@pytest.mark.parametrize("case", CASES)
def test_right_kernels(run_body, case):
    body, header, arguments, expected = CASES[case]
    (output,) = run_body(body, header, **arguments)
    np.testing.assert_array_equal(np.array(output.astype(mx.float32)), expected)


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    "dtype", [mx.float16, mx.bfloat16, mx.int8, mx.uint8, mx.int16, mx.uint16, mx.uint32, mx.int64, mx.bool_]
)
def test_dtypes_survive(run_body, dtype):
    x = mx.arange(256).astype(dtype)
    (output,) = run_body("o[i] = x[i];", dtype=dtype)
    assert output.dtype == dtype
    assert mx.array_equal(output, x)


def test_shapes_strides_and_scalars():
    """Inputs of which the kernel takes shape, strides and ndim, a 0-d input, a non-contiguous one, two outputs."""
    a = mx.arange(6 * 32).reshape(32, 6).T  # [6, 32]: MLX hands a contiguous copy to the kernel
    kernel = mx.fast.metal_kernel(
        name="shapes",
        input_names=["a", "by"],
        output_names=["y", "n"],
        source="""
            uint3 t = thread_position_in_grid;
            long at = t.y * a_strides[0] + t.x * a_strides[1];
            y[at] = a[at] * by;
            if (at == 0) n[0] = a_ndim * 1000 + a_shape[0] * 100 + a_shape[1];
        """,
    )
    y, n = verify(
        kernel,
        inputs=[a, 3],
        grid=(32, 6, 1),
        threadgroup=(32, 2, 1),
        output_shapes=[a.shape, (1,)],
        output_dtypes=[a.dtype, mx.int32],
    )
    assert mx.array_equal(y, a * 3)
    assert n.item() == 2632


RMS_NORM = """
    threadgroup float part[W];
    const uint row = threadgroup_position_in_grid.y, lane = thread_index_in_simdgroup;
    device const float* from = x + row * D;
    device float* to = o + row * D;
    float sum = 0.0f;
    for (uint i = thread_position_in_threadgroup.x; i < D; i += W * 32) sum += from[i] * from[i];
    sum = simd_sum(sum);
    if (lane == 0) part[simdgroup_index_in_threadgroup] = sum;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    float total = 0.0f;
    for (int w = 0; w < W; ++w) total += part[w];
    const float scale = metal::rsqrt(total / float(D) + 1e-6f);
    for (uint i = thread_position_in_threadgroup.x; i < D; i += W * 32) to[i] = from[i] * scale;
"""
MUTANTS = [
    ("threadgroup_barrier(mem_flags::mem_threadgroup);", ""),
    ("threadgroup_barrier(mem_flags::mem_threadgroup);", "simdgroup_barrier(mem_flags::mem_threadgroup);"),
    ("sum = simd_sum(sum);\n    if (lane == 0)", "if (lane == 0) sum = simd_sum(sum);\n    if (lane == 0)"),
    ("sum = simd_sum(sum);", ""),
    ("if (lane == 0) part", "if (lane == 1 && sum < 0) part"),
    ("part[W]", "part[W - 1]"),
    ("w < W", "w <= W"),
    ("i < D; i += W * 32) sum", "i <= D; i += W * 32) sum"),
    ("i < D; i += W * 32) to", "i <= D; i += W * 32) to"),
    ("i < D; i += W * 32) to", "i < D - 1; i += W * 32) to"),
    ("device float* to", "float* to"),
    ("row * D;\n    device float", "row * 1000;\n    device float"),
    ("const float scale", "const double scale"),
    ("float(D)", "float(W)"),
]


def rms_norm(source: str, **options: Any) -> tuple[mx.array, mx.array]:
    """(the kernel's result, what it should be) on 3 rows of 1001 elements, 4 SIMD-groups a row."""
    rows, size, simdgroups = 3, 1001, 4
    x = mx.random.normal((rows, size), key=mx.random.key(0))
    kernel = mx.fast.metal_kernel(name="rms", input_names=["x"], output_names=["o"], source=source)
    run = simulate if "schedule" in options else verify
    (y,) = run(
        kernel,
        inputs=[x],
        template=[("D", size), ("W", simdgroups)],
        grid=(32 * simdgroups, rows, 1),
        threadgroup=(32 * simdgroups, 1, 1),
        output_shapes=[x.shape],
        output_dtypes=[x.dtype],
        **options,
    )
    return y, mx.fast.rms_norm(x, None, 1e-6)


def is_close(y: mx.array, expected: mx.array) -> bool:
    return bool(mx.allclose(y, expected, rtol=1e-5, atol=1e-6))


def test_rms_norm():
    assert is_close(*rms_norm(RMS_NORM))


def test_rms_norm_contracted():
    """Fused multiply-adds change last bits only."""
    y, expected = rms_norm(RMS_NORM, contract=True, schedule=Schedule.FORWARD)
    assert is_close(y, expected)


@pytest.mark.sample(3)
@pytest.mark.parametrize(("old", "new"), MUTANTS)
def test_mutants_of_rms_norm_are_noticed(old, new):
    assert old in RMS_NORM
    try:
        y, expected = rms_norm(RMS_NORM.replace(old, new, 1))
    except MetalError:
        return
    assert not is_close(y, expected), f"{old!r} -> {new!r} went unnoticed"


def test_text_is_mlx_own(run_body):
    """The kernel that is compiled is the function MLX writes, with its template instantiated."""
    from metal_sim.source import trace, translate

    kernel = mx.fast.metal_kernel(
        name="own", input_names=["x"], output_names=["o"], source="uint i = thread_position_in_grid.x; o[i] = T(x[i]);"
    )
    traced = trace(
        kernel,
        [mx.zeros(32)],
        template=[("T", mx.float16)],
        grid=(32, 1, 1),
        threadgroup=(32, 1, 1),
        output_shapes=[(32,)],
        output_dtypes=[mx.float16],
    )
    assert re.search(
        r"\[\[kernel\]\] void custom_kernel_own\w*\(\s+const device float\* x \[\[buffer\(0\)\]\]", traced.text
    )
    cpp, buffers = translate(traced.text)
    assert buffers == ["x", "o"]
    assert re.search(r"custom_kernel_own\w*<half>\(\(const device float\*\)", cpp) or "float16_t" in cpp
