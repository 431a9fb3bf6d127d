"""One kernel body, two back ends.

A body is C++ that both Metal and CUDA compile, with the few words in which they differ spelled as macros of a prelude:

    FN            a helper function                  LANES          32, the width of a simdgroup or warp
    SHARED        threadgroup memory                 lane, warp     place in it, and its number in the threadgroup
    BARRIER()     wait for the threadgroup           tid, gid       thread position in threadgroup and grid (uint3)
    XOR(v, m)     v of the lane whose number differs by m          BITS(T, x)     the bits of x as a T
    load4(p)      4 consecutive elements as an F4 of floats        store4(p, q)   and back, to an output of float
    CAST(T, p)    device pointer p to const T                      POPCOUNT(x)    the number of set bits of a uint
    UNROLL        before a loop whose arrays must stay in registers; UNROLL_BY(n): n rounds at a time

Rules that keep one text right on both: ``auto`` for derived pointers (Metal's carry address spaces), sizes as template
ints, no 0-d inputs, inputs of at least 8 elements where a helper takes their pointer, bounds checks (CUDA rounds the
grid up), 64-bit offsets into large buffers, tables as input arrays (text in the header costs time at every call).
``lane_sum`` adds in the same order on both, ``lane_sum_of<L>`` over each L neighbouring lanes. ``CAST`` is the caller's
promise that the address suits the type.

Launches are safe by construction: see ``Geometry``. Nothing here needs a GPU until ``Launch.run``.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import mlx.core as mx

MAX_THREADS = 256
"""Threads per threadgroup. Older Apple chips reject more, and a rejected launch leaves its output as it was."""
MAX_GROUPS = 1 << 25
"""Threadgroups per launch. Beyond some such number Apple GPUs have been seen to skip some silently."""

_METAL = r"""
#define FN inline
#define SHARED threadgroup
#define BARRIER() threadgroup_barrier(mem_flags::mem_threadgroup)
#define XOR(v, m) simd_shuffle_xor(v, m)
#define BITS(T, x) as_type<T>(x)
#define CAST(T, p) ((const device T*)(p))
#define POPCOUNT(x) popcount(x)
#define UNROLL _Pragma("clang loop unroll(full)")
#define PRAGMA_(text) _Pragma(#text)
#define UNROLL_BY(n) PRAGMA_(clang loop unroll_count(n))
struct F4 { float v[4]; };
template <typename P> FN F4 load4(P p) { return F4{{float(p[0]), float(p[1]), float(p[2]), float(p[3])}}; }
template <typename P> FN void store4(P p, F4 q) { for (int i = 0; i < 4; ++i) p[i] = q.v[i]; }
#define ALIGNED(p) true
#define load4_aligned load4
"""
_METAL_IDS = r"""
const uint3 gid = thread_position_in_grid;
const uint3 tid = thread_position_in_threadgroup;
const uint lane = thread_index_in_simdgroup;
const uint warp = simdgroup_index_in_threadgroup;
"""
_CUDA = r"""
#define FN __device__ __forceinline__
#define SHARED __shared__
#define BARRIER() __syncthreads()
#define XOR(v, m) __shfl_xor_sync(0xffffffffu, v, m)
#define BITS(T, x) bits<T>(x)
typedef unsigned int uint;
typedef unsigned short ushort;
typedef unsigned char uchar;
typedef __half half;
typedef __nv_bfloat16 bfloat;
template <typename T, typename U> FN T bits(U u) {
  static_assert(sizeof(T) == sizeof(U), "sizes differ");
  T t;
  memcpy(&t, &u, sizeof(T));
  return t;
}
#define CAST(T, p) ((const T*)(p))
#define POPCOUNT(x) uint(__popc(x))
#define UNROLL _Pragma("unroll")
#define PRAGMA_(text) _Pragma(#text)
#define UNROLL_BY(n) PRAGMA_(unroll n)
struct F4 { float v[4]; };
template <typename T> FN F4 load4(const T* p) { return F4{{float(p[0]), float(p[1]), float(p[2]), float(p[3])}}; }
#define ALIGNED(p) (size_t(p) % 16 == 0)
template <typename T> FN F4 load4_aligned(const T* p) {
  struct alignas(4 * sizeof(T)) Q { T v[4]; };
  const Q q = *(const Q*)p;
  return F4{{float(q.v[0]), float(q.v[1]), float(q.v[2]), float(q.v[3])}};
}
FN void store4(float* p, F4 q) { *(float4*)p = make_float4(q.v[0], q.v[1], q.v[2], q.v[3]); }
"""
_CUDA_IDS = r"""
const uint3 tid = make_uint3(threadIdx.x, threadIdx.y, threadIdx.z);
const uint3 gid = make_uint3(blockIdx.x * blockDim.x + tid.x, blockIdx.y * blockDim.y + tid.y,
                             blockIdx.z * blockDim.z + tid.z);
const uint flat_ = tid.x + blockDim.x * (tid.y + blockDim.y * tid.z);
const uint lane = flat_ & 31, warp = flat_ >> 5;
"""
_COMMON = r"""
#define LANES 32
template <int L> FN float lane_sum_of(float v) {
  UNROLL for (int m = 1; m < L; m *= 2) v += XOR(v, m);
  return v;
}
FN float lane_sum(float v) { return lane_sum_of<32>(v); }
"""
_PRELUDES = {"metal": (_METAL + _COMMON, _METAL_IDS), "cuda": (_CUDA + _COMMON, _CUDA_IDS)}


def aligned_or_not(pointer: str, text: str) -> str:
    """Statements that ``load4`` at multiples of 4 elements from ``pointer``, by one load each where the address allows.

    Arrays start at multiples of 16 bytes unless they are a part of another. CUDA's compiler joins no loads by itself.
    """
    slow = re.sub(r"UNROLL_BY\(\d+\)", "UNROLL_BY(1)", text)
    return f"  if (ALIGNED({pointer})) {{{text.replace('load4(', 'load4_aligned(')}  }} else {{{slow}  }}\n"


@dataclass(frozen=True)
class Geometry:
    """Grid and threadgroup in threads, as MLX takes them.

    Raises ValueError for what some chip would reject or cut silently: more than 256 threads per threadgroup, a grid
    dimension that is not a multiple of its threadgroup dimension, 2^25 threadgroups or more.
    """

    grid: tuple[int, int, int]
    threadgroup: tuple[int, int, int]

    def __post_init__(self) -> None:
        x, y, z = self.threadgroup
        if min(self.threadgroup) < 1 or x * y * z > MAX_THREADS:
            raise ValueError(f"threadgroup {self.threadgroup} has {x * y * z} threads; allowed: 1 to {MAX_THREADS}")
        for size, part in zip(self.grid, self.threadgroup, strict=True):
            if size < part or size % part:
                raise ValueError(f"grid {self.grid} is not a multiple of threadgroup {self.threadgroup}")
        if self.groups >= MAX_GROUPS:
            raise ValueError(f"grid {self.grid} has {self.groups} threadgroups; allowed: fewer than {MAX_GROUPS}")

    @property
    def groups(self) -> int:
        """Threadgroups in the launch."""
        out = 1
        for size, part in zip(self.grid, self.threadgroup, strict=True):
            out *= size // part
        return out

    @classmethod
    def of_groups(cls, groups: tuple[int, int, int], threads: int = MAX_THREADS) -> Geometry:
        """``groups`` threadgroups of ``threads`` threads along x."""
        return cls((groups[0] * threads, groups[1], groups[2]), (threads, 1, 1))


class PortableKernel:
    """A kernel body with its inputs' and outputs' names; built for a back end once, on first use."""

    def __init__(self, name: str, inputs: Sequence[str], outputs: Sequence[str], body: str, header: str = ""):
        self.name, self.inputs, self.outputs = name, tuple(inputs), tuple(outputs)
        self.body, self.header = body, header

    @cached_property
    def metal(self) -> Any:
        """The object of ``mx.fast.metal_kernel``; building it needs no Metal, calling it does."""
        return self._build("metal")

    @cached_property
    def cuda(self) -> Any:
        """The object of ``mx.fast.cuda_kernel``."""
        return self._build("cuda")

    def text(self, backend: str) -> tuple[str, str]:
        """Header and source as MLX gets them, preludes included. backend: "metal" or "cuda"."""
        prelude, ids = _PRELUDES[backend]
        return prelude + self.header, ids + self.body

    def _build(self, backend: str) -> Any:
        header, source = self.text(backend)
        return getattr(mx.fast, f"{backend}_kernel")(
            name=self.name,
            input_names=list(self.inputs),
            output_names=list(self.outputs),
            source=source,
            header=header,
        )


@dataclass(frozen=True)
class Launch:
    """One call of a kernel: a pure description, run on a GPU or handed to the simulator."""

    kernel: PortableKernel
    inputs: Sequence[mx.array]
    template: Sequence[tuple[str, Any]]
    geometry: Geometry
    output_shapes: Sequence[tuple[int, ...]]
    output_dtypes: Sequence[mx.Dtype]

    @property
    def arguments(self) -> dict[str, Any]:
        """Keywords of MLX's kernel objects."""
        return {
            "inputs": list(self.inputs),
            "template": list(self.template),
            "grid": self.geometry.grid,
            "threadgroup": self.geometry.threadgroup,
            "output_shapes": list(self.output_shapes),
            "output_dtypes": list(self.output_dtypes),
        }

    def run(self, backend: str, poison: float | None = None) -> list[mx.array]:
        """The outputs, lazily. backend: "metal" or "cuda". poison: what elements hold that the kernel leaves out."""
        return getattr(self.kernel, backend)(**self.arguments, init_value=poison)
