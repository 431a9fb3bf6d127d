"""Runs `mx.fast.metal_kernel` kernels on a CPU, so that Metal code can be proven without a Mac.

    from metal_sim import verify
    (y,) = verify(kernel, inputs=[x], template=[("T", mx.float32)], grid=(256, 1, 1), threadgroup=(128, 1, 1),
                  output_shapes=[(256,)], output_dtypes=[mx.float32])

How: MLX writes the text that it would hand to Apple's compiler; clang (inside pip's `ziglang`) compiles it against a
small Metal standard library; every thread becomes a fiber, 32 fibers a SIMD-group, and the kernel runs under three
schedules. Wrong kernels raise `MetalError`, which names the line, or the buffer and byte.

What is proven, if `verify` returns:
  - the text compiles: types, address spaces, overloads, literals, and Metal's own rules (no double, no std::, no
    recursion, no lambdas, no pointer without address space, program-scope variables in the constant space, ...);
  - the launch is whole: three positive sizes, at most 256 threads a threadgroup, grids that are multiples of it, at
    most 32 KiB of threadgroup memory;
  - no access outside a buffer, no write to an input, no shift by the width or more, no division by zero, no misaligned
    pointer, no index outside a local array (for this input);
  - every thread comes to every barrier, every lane of a SIMD-group to every SIMD-group function;
  - every element of the outputs is written, and no bit of them depends on the order in which lanes, SIMD-groups and
    threadgroups run, nor on uninitialised memory.

What is not:
  - it is not Apple's compiler: that one may refuse, or miscompile, what passes here. Metal functions that are not in
    include/msl (textures, simdgroup matrices, quad functions, vec<T, N>(...) constructors, ...) are compile errors;
  - the last bits of floats: Apple's compiler may fuse a * b + c (`contract=True` fuses here), its exp, log and the
    like are not libm's, and simd_sum adds in an order of its own. Compare with tolerances, not bit for bit;
  - races that no schedule shows: two threads that write the same value, or a chip that runs a SIMD-group out of step;
  - a helper with a SIMD-group function, called from two branches of one `if` by the two halves of a SIMD-group: inside
    the helper the calls are one place in the text, so they seem to meet;
  - non-contiguous inputs of kernels built with ensure_row_contiguous=False: they get a contiguous copy;
  - C-style casts from one address space to another: clang allows them, Apple does not. static_cast is checked;
  - alignment, where helpers are overloaded by address space alone (clang checks it in one space only);
  - reads of up to 15 bytes past an array of bytes whose size is no multiple of 16, where no result depends on them;
  - registers, occupancy, memory limits and speed. A chip may allow fewer threads than the rule above.

Where it cannot run (no ziglang, no Linux), `why_not()` says so and the mark `needs_simulator` skips with that reason.
"""

import pytest

from .api import simulate, verify
from .compiler import why_not
from .errors import MetalError
from .intercept import load_copy, metal_on_cpu
from .launch import Schedule

needs_simulator = pytest.mark.skipif(why_not() is not None, reason=why_not() or "")

__all__ = ["MetalError", "Schedule", "load_copy", "metal_on_cpu", "needs_simulator", "simulate", "verify", "why_not"]
