"""Wrong kernels raise MetalError, each for its own reason."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest

from metal_sim import MetalError, needs_simulator

pytestmark = needs_simulator

SHARED = "threadgroup float s[128]; s[l] = x[i]; "
BARRIER = "threadgroup_barrier(mem_flags::mem_threadgroup); "
POINTER_HELPER = "inline float f(%s float* p) { return *p; }\n"
TABLE = "float tab[4] = {1, 2, 3, 4};\n"

# name: (body, header, other arguments of run_body, part of the message)
LANGUAGE: dict[str, tuple[str, str, dict[str, Any], str]] = {
    "device pointer to a thread helper": ("o[i] = f(x + i);", POINTER_HELPER % "thread const", {}, "no matching"),
    "constant pointer to a device helper": (
        "o[i] = f(table) + x[i];",
        POINTER_HELPER % "device const",
        {"table": 4},
        "no matching",
    ),
    "helper parameter without space": ("o[i] = f(x + i);", POINTER_HELPER % "const", {}, "without address space"),
    "local pointer without space": ("float v = x[i]; float* p = &v; o[i] = *p;", "", {}, "without address space"),
    "reference without space": (
        "o[i] = f(x[i]);",
        "inline float f(const float& v) { return v; }\n",
        {},
        "without address space",
    ),
    "threadgroup pointer to device memory": (
        "threadgroup const float* p = x; o[i] = p[i];",
        "",
        {},
        "cannot initialize",
    ),
    "static_cast between spaces": ("auto p = static_cast<threadgroup const float*>(x); o[i] = p[i];", "", {}, "error"),
    "reinterpret_cast between spaces": (
        "auto p = reinterpret_cast<threadgroup const float*>(x); o[i] = p[i];",
        "",
        {},
        "error",
    ),
    "write through an input": ("x[i] = 1; o[i] = 0;", "", {}, "read-only|const"),
    "double": ("double v = x[i]; o[i] = v;", "", {}, "double does not exist"),
    "std": ("o[i] = std::max(x[i], 1.0f);", "", {}, "no std::"),
    "CUDA barrier": ("__syncthreads(); o[i] = x[i];", "", {}, "CUDA name"),
    "CUDA index": ("o[threadIdx.x] = x[i];", "", {}, "CUDA name"),
    "CUDA shuffle": ("o[i] = __shfl_xor_sync(0xffffffffu, x[i], 1);", "", {}, "CUDA name"),
    "C function": ("o[i] = expf(x[i]);", "", {}, "undeclared"),
    "unknown attribute": ("o[i] = x[i] + thread_index_in_quad;", "", {}, "undeclared"),
    "float to bfloat": ("o[i] = x[i] * 2.0f;", "", {"dtype": mx.bfloat16}, "__bf16"),
    "max of float and int": ("o[i] = max(x[i], 1);", "", {}, "no matching|conflicting"),
    "max of half and float": ("o[i] = max(x[i], 1.0f);", "", {"dtype": mx.float16}, "no matching|conflicting"),
    "exp of an integer": ("o[i] = exp(i);", "", {}, "no matching"),
    "three components for float4": ("float4 v = float4(x[i], 1.0f, 2.0f); o[i] = v.x;", "", {}, "vector components"),
    "float4 to half4": ("float4 v = float4(x[i]); half4 h = v; o[i] = h.x;", "", {}, "cannot initialize|error"),
    "as_type of another size": ("o[i] = as_type<half>(x[i]);", "", {}, "types of one size"),
    "array of run-time size": ("int n = i; float a[n]; a[0] = x[i]; o[i] = a[0];", "", {}, "variable length"),
    "uninitialised variable": ("float v; o[i] = v + x[i];", "", {}, "uninitialized"),
    "C++17": ("struct P { float a, b; }; auto [a, b] = P{x[i], 1}; o[i] = a + b;", "", {}, "C\\+\\+17"),
    "lambda": ("auto f = [&](float v) { return v; }; o[i] = f(x[i]);", "", {}, "lambda"),
    "function pointer": ("float (*f)(float) = metal::exp; o[i] = f(x[i]);", "", {}, "function pointer"),
    "recursion": ("o[i] = f(x[i]);", "inline float f(float v) { return v < 1 ? v : f(v - 1); }\n", {}, "recursion: f"),
    "mutual recursion": (
        "o[i] = f(x[i]);",
        "float g(float v);\ninline float f(float v) { return g(v); }\ninline float g(float v) { return f(v); }\n",
        {},
        "recursion",
    ),
    "table in no space": ("o[i] = tab[i & 3];", TABLE, {}, "not in constant address space"),
    "static table in no space": ("o[i] = tab[i & 3];", f"static const {TABLE}", {}, "not in constant address space"),
    "40 KiB of threadgroup memory": (
        f"threadgroup float s[10240]; s[i] = x[i]; {BARRIER} o[i] = s[i];",
        "",
        {},
        "32768 bytes",
    ),
}

MEMORY: dict[str, tuple[str, str]] = {
    "read past the end": ("o[i] = x[i + 1];", "out-of-bounds access at byte 1024 of input 'x'"),
    "read before the start": ("o[i] = x[(int)i - 1];", "out-of-bounds access at byte -4 of input 'x'"),
    "write past the end": ("o[i + 1] = x[i];", "out-of-bounds access at byte 1024 of output 'o'"),
    "write before the start": ("o[(int)i - 1] = x[i];", "out-of-bounds (access|write) at byte -4 of output 'o'"),
    "wild read": ("o[i] = x[(size_t)i << 30];", "in no buffer"),
    "write to an input by a cast": ("((device float*)x)[i] = 1; o[i] = 0;", "write to byte 0 of input 'x'"),
    "odd elements unwritten": (
        "if (i & 1) o[i] = x[i];",
        "128 of 256 elements are never written; the first at \\(0,\\)",
    ),
    "last element unwritten": ("if (i < 255) o[i] = x[i];", "1 of 256 elements are never written.*255"),
    "threadgroup memory never written": (
        f"threadgroup float s[128]; {BARRIER} o[i] = s[l] * 3 + x[i];",
        "uninitialised",
    ),
    "local array beyond its end": ("float a[4] = {1, 2, 3, 4}; o[i] = a[i & 7];", "index outside a local"),
    "threadgroup array beyond its end": (
        f"{SHARED}{BARRIER} o[i] = s[l + 1];",
        "index outside a local or constant array|uninitialised",
    ),
    "misaligned vector": ("float4 v = ((device const float4*)(x + 1))[i / 4 % 4]; o[i] = v.x;", "misaligned"),
    "misaligned half in a record": (
        "o[i] = *(device const half*)((device const uchar*)x + 3 * (i % 32));",
        "misaligned",
    ),
    "shift by 32": ("uint u = 1u << (i + 1); o[i] = u;", "shift by the type's width"),
    "division by zero": ("o[i] = 7 / (int)i;", "division by zero"),
    "deep stack": (
        "o[i] = x[i]; volatile float a[100000]; a[i] = 1;",
        "stack overflows",
    ),
    "endless loop": ("while (x[0] == 0) { o[i] += 1; }", "still running after 1 s"),
}

ORDER: dict[str, tuple[str, str]] = {
    "no barrier before reading": (f"{SHARED} o[i] = s[127 - l];", "depend on the schedule"),
    "no barrier before writing again": (
        f"{SHARED}{BARRIER} float v = s[127 - l]; s[l] = -v; {BARRIER} o[i] = s[l ^ 1];",
        "depend on the schedule",
    ),
    "no barrier within a SIMD-group": (f"{SHARED} o[i] = s[l ^ 1];", "depend on the schedule"),
    "simdgroup_barrier where a threadgroup_barrier belongs": (
        f"{SHARED} simdgroup_barrier(mem_flags::mem_threadgroup); o[i] = s[127 - l];",
        "depend on the schedule",
    ),
    "two threads write one element": ("o[i] = x[i]; if (i > 0) o[i - 1] = x[i];", "depend on the schedule"),
    "two threadgroups write one element": ("o[i] = 0; o[l] = x[i];", "depend on the schedule"),
    "barrier in one branch": (f"{SHARED} if (l < 64) {{ {BARRIER} }} o[i] = s[l];", "not reached by every thread"),
    "barriers in two branches": (
        f"{SHARED} if (l < 64) {{ {BARRIER} }} else {{ {BARRIER} }} o[i] = s[l];",
        "different threadgroup_barriers|not reached",
    ),
    "return before a barrier": (f"if (i > 200) return; {SHARED}{BARRIER} o[i] = s[127 - l];", "not reached by every"),
    "barrier in a loop of uneven length": (
        f"for (uint n = 0; n <= l / 64; n++) {{ {BARRIER} }} o[i] = x[i];",
        "not reached by every",
    ),
    "simd_sum in one branch": ("float v = x[i]; if (i & 1) v = simd_sum(v); o[i] = v;", "part of the SIMD-group"),
    "simd_sum in two branches": (
        "float v = x[i]; if (i & 1) { v = simd_sum(v); } else { v = simd_sum(-v); } o[i] = v;",
        "part of the SIMD-group",
    ),
    "return before simd_sum": ("if ((i & 31) > 20) return; o[i] = simd_sum(x[i]);", "part of the SIMD-group"),
    "shuffle from lane 40": ("o[i] = simd_shuffle(x[i], 40);", "inactive or beyond 31"),
    "float atomics": (
        "threadgroup atomic<float> sum; if (l == 0) atomic_store_explicit(&sum, 0.0f, memory_order_relaxed);"
        f"{BARRIER} atomic_fetch_add_explicit(&sum, x[i] * 0.1f, memory_order_relaxed); {BARRIER}"
        "o[i] = atomic_load_explicit(&sum, memory_order_relaxed);",
        "depend on the schedule",
    ),
}

LAUNCHES: dict[str, tuple[dict[str, Any], str]] = {
    "grid smaller than its threadgroup": ({"grid": (64, 1, 1)}, "smaller than threadgroup.x = 128"),
    "grid no multiple of its threadgroup": ({"grid": (300, 1, 1)}, "no multiple of threadgroup.x = 128"),
    "grid cut in y": ({"grid": (256, 3, 1), "threadgroup": (32, 2, 1)}, "grid.y = 3 is no multiple"),
    "512 threads": ({"grid": (512, 1, 1), "threadgroup": (512, 1, 1)}, "512 threads; at most 256"),
    "256 threads in three axes, and more": ({"grid": (32, 4, 4), "threadgroup": (32, 4, 4)}, "512 threads"),
    "2048 threads": (
        {"grid": (2048, 1, 1), "threadgroup": (2048, 1, 1), "strict_launch": False},
        "2048 threads; at most 1024",
    ),
    "empty grid": ({"grid": (0, 1, 1)}, "at least 1"),
    "2^25 threadgroups": ({"grid": (1 << 25, 1, 1), "threadgroup": (1, 1, 1)}, "33554432 threadgroups"),
}


@pytest.mark.sample(12)
@pytest.mark.parametrize("case", LANGUAGE)
def test_text_that_is_not_metal(run_body, case):
    body, header, arguments, message = LANGUAGE[case]
    with pytest.raises(MetalError, match=message):
        run_body(body, header, **arguments)


@pytest.mark.sample(4)
@pytest.mark.parametrize("case", MEMORY)
def test_memory(run_body, case):
    body, message = MEMORY[case]
    with pytest.raises(MetalError, match=message):
        run_body(body, limit_s=1 if "endless" in case else 60)


@pytest.mark.sample(3)
@pytest.mark.parametrize("case", ORDER)
def test_order_and_divergence(run_body, case):
    body, message = ORDER[case]
    with pytest.raises(MetalError, match=message):
        run_body(body)


@pytest.mark.parametrize("case", LAUNCHES)
def test_launches(run_body, case):
    arguments, message = LAUNCHES[case]
    with pytest.raises(MetalError, match=message):
        run_body("o[i] = x[i];", **arguments)


def test_message_names_line_and_text(run_body):
    with pytest.raises(MetalError, match=r"kernel\.metal:2: lint: program-scope variable.*float tab\[4\]"):
        run_body("o[i] = tab[i & 3];", f"\n{TABLE}")
    with pytest.raises(
        MetalError, match=r"kernel\.metal:\d+: shift .*\(threadgroup \(0, 0, 0\), thread \(31, 0, 0\)\)"
    ):
        run_body("\nuint u = 1u << (i + 1);\no[i] = u;")
