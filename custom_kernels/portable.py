"""One kernel body, two back ends.

A body is C++ that both Metal and CUDA compile, with the few words in which they differ spelled as macros of a prelude:

    FN            a helper function                  LANES          32, the width of a simdgroup or warp
    SHARED        threadgroup memory                 lane, warp     place in it, and its number in the threadgroup
    BARRIER()     wait for the threadgroup           tid, gid       thread position in threadgroup and grid (uint3)
    XOR(v, m)     v of the lane whose number differs by m          BITS(T, x)     the bits of x as a T

Rules that keep one text right on both: ``auto`` for derived pointers (Metal's carry address spaces), sizes as template
ints, no 0-d inputs, inputs of at least 8 elements where a helper takes their pointer, bounds checks (CUDA rounds the
grid up), 64-bit offsets into large buffers, tables as input arrays (text in the header costs time at every call).
``lane_sum`` adds in the same order on both.

Launches are safe by construction: see ``Geometry``. Nothing here needs a GPU until ``Launch.run``.
"""

from __future__ import annotations

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
FN float lane_sum(float v) {
  v += XOR(v, 1);
  v += XOR(v, 2);
  v += XOR(v, 4);
  v += XOR(v, 8);
  v += XOR(v, 16);
  return v;
}
"""


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
        return mx.fast.metal_kernel(
            name=self.name,
            input_names=list(self.inputs),
            output_names=list(self.outputs),
            source=_METAL_IDS + self.body,
            header=_METAL + _COMMON + self.header,
        )

    @cached_property
    def cuda(self) -> Any:
        """The object of ``mx.fast.cuda_kernel``."""
        return mx.fast.cuda_kernel(
            name=self.name,
            input_names=list(self.inputs),
            output_names=list(self.outputs),
            source=_CUDA_IDS + self.body,
            header=_CUDA + _COMMON + self.header,
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

    def run(self, backend: str) -> list[mx.array]:
        """The outputs, lazily. backend: "metal" or "cuda"."""
        return getattr(self.kernel, backend)(**self.arguments)
