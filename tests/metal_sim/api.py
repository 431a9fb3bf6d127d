"""`simulate` runs a kernel under one schedule, `verify` under all three, and both take what the kernel takes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from . import compiler
from .buffers import GuardedBuffer
from .errors import MetalError
from .launch import Buffer, Schedule, check_launch, run
from .lint import lint
from .source import Trace, trace, translate

# How each dtype travels through NumPy, which has no bfloat16
_CARRIERS = {
    mx.float32: np.float32,
    mx.float16: np.float16,
    mx.bfloat16: np.uint16,
    mx.bool_: np.uint8,
    **{getattr(mx, f"{sign}int{n}"): np.dtype(f"{sign}int{n}").type for sign in ("", "u") for n in (8, 16, 32, 64)},
}


def simulate(
    kernel: Callable[..., Any],
    *,
    inputs: Sequence[mx.array | bool | int | float],
    grid: Sequence[int],
    threadgroup: Sequence[int],
    output_shapes: Sequence[Sequence[int]],
    output_dtypes: Sequence[mx.Dtype],
    template: Sequence[tuple[str, Any]] = (),
    init_value: float | None = None,
    schedule: Schedule = Schedule.FORWARD,
    strict_launch: bool = True,
    base_alignment: int | None = None,
    contract: bool = False,
    limit_s: int = 60,
) -> list[mx.array]:
    """Run what `mx.fast.metal_kernel` returned under one schedule.

    The first seven arguments and `init_value` are the kernel's own; the rest are the simulator's.

    Args:
        schedule: the order of lanes, SIMD-groups and threadgroups.
        strict_launch: refuse threadgroups of more than 256 threads and grids that are not multiples of their
            threadgroup; otherwise only what Metal itself refuses.
        base_alignment: of every buffer, in bytes. By default an array of wider elements may start at any element,
            as an MLX slice does, and one of bytes at a multiple of 16, since bytes are what packed data is cast from.
        contract: let the compiler fuse a * b + c, as Apple's may; results then differ in the last bits.
        limit_s: the time after which a kernel counts as endless.

    Returns:
        One new array per output; elements that the kernel has not written hold the schedule's poison.

    Raises:
        MetalError: the kernel does not compile, breaks a rule of the language or the launch, or fails while it runs.
    """
    arrays = [a if isinstance(a, mx.array) else mx.array(a) for a in inputs]
    for dtype in (*(a.dtype for a in arrays), *output_dtypes):
        if dtype not in _CARRIERS:
            raise TypeError(f"{dtype} arrays are not simulated")
    mx.eval(arrays)
    check_launch(grid, threadgroup, strict=strict_launch)
    traced = trace(
        kernel,
        arrays,
        template=list(template),
        grid=tuple(grid),
        threadgroup=tuple(threadgroup),
        output_shapes=list(output_shapes),
        output_dtypes=list(output_dtypes),
        init_value=init_value,
    )
    if findings := lint(traced):
        raise MetalError("\n".join(findings))
    cpp, names = translate(traced.text)
    library = compiler.build(cpp, contract)
    buffers = _input_buffers(arrays, traced, schedule, base_alignment)
    for shape, dtype in zip(output_shapes, output_dtypes, strict=True):
        buffers.append(_output_buffer(shape, dtype, init_value, schedule, base_alignment))
    if len(buffers) != len(names):
        raise MetalError(f"the kernel takes buffers {names} but the call has {len(buffers)}")
    for buffer, name in zip(buffers, names, strict=True):
        buffer.name = name
    run(library, buffers, grid=grid, threadgroup=threadgroup, schedule=schedule, limit_s=limit_s, trace=traced)
    results = [b.guarded.read() for b in buffers if b.is_output]
    return [_to_array(r, s, d) for r, s, d in zip(results, output_shapes, output_dtypes, strict=True)]


def verify(kernel: Callable[..., Any], **call: Any) -> list[mx.array]:
    """Run a kernel under all three schedules and demand one result, fully written.

    Takes the arguments of `simulate` but `schedule`. Between the schedules the order of everything changes that
    Metal leaves open, so do the contents of memory that nobody has written, and the side on which buffers touch a
    guard page. Bits that differ mean a race (often a missing barrier), a sum whose order is open (float atomics), or
    a read of uninitialised memory.

    Returns:
        One new array per output.

    Raises:
        MetalError: as `simulate`, or where results differ or an element is never written.
    """
    runs = {schedule: simulate(kernel, schedule=schedule, **call) for schedule in Schedule}
    for index in range(len(call["output_shapes"])):
        raw = {schedule: _to_bytes(outputs[index]) for schedule, outputs in runs.items()}
        _demand_equal(index, raw, runs[Schedule.FORWARD][index])
    return runs[Schedule.FORWARD]


def _demand_equal(index: int, raw: dict[Schedule, np.ndarray], output: mx.array) -> None:
    """`raw` holds the output's bytes per schedule, shaped [elements, bytes of an element]."""
    unwritten = np.logical_and.reduce([(r == schedule.poison).all(axis=1) for schedule, r in raw.items()])
    first, *others = raw.values()
    differing = np.logical_or.reduce([(first != other).any(axis=1) for other in others])
    for elements, what in (
        (unwritten, "are never written"),
        (differing, "depend on the schedule or on uninitialised memory (a race, a missing barrier, float atomics)"),
    ):
        if elements.any():
            at = tuple(int(i) for i in np.unravel_index(int(elements.argmax()), output.shape or (1,)))
            raise MetalError(f"output {index}: {elements.sum()} of {output.size} elements {what}; the first at {at}")


def _input_buffers(
    arrays: Sequence[mx.array], traced: Trace, schedule: Schedule, base_alignment: int | None
) -> list[Buffer]:
    """The inputs, each followed by what the kernel takes of its shape, strides and number of dimensions."""
    buffers = []
    for array, (takes_shape, takes_strides, takes_ndim) in zip(arrays, traced.shape_infos, strict=True):
        buffers.append(_readonly(_to_bytes(array), _alignment(array.dtype, base_alignment), schedule))
        if array.ndim == 0:
            continue
        strides = [math.prod(array.shape[i + 1 :]) for i in range(array.ndim)]
        for takes, values in (
            (takes_shape, np.array(array.shape, np.int32)),
            (takes_strides, np.array(strides, np.int64)),
            (takes_ndim, np.array([array.ndim], np.int32)),
        ):
            if takes:
                buffers.append(_readonly(values, values.itemsize, schedule))
    return buffers


def _readonly(data: np.ndarray, alignment: int, schedule: Schedule) -> Buffer:
    guarded = GuardedBuffer(
        data.nbytes,
        data=data.tobytes(),
        readonly=True,
        alignment=alignment,
        place=schedule.place,
        poison=schedule.poison,
    )
    return Buffer("", guarded)


def _output_buffer(
    shape: Sequence[int], dtype: mx.Dtype, init_value: float | None, schedule: Schedule, base_alignment: int | None
) -> Buffer:
    size = math.prod(shape)
    data = None if init_value is None else _to_bytes(mx.full(shape, init_value, dtype)).tobytes()
    guarded = GuardedBuffer(
        size * dtype.size,
        data=data,
        alignment=_alignment(dtype, base_alignment),
        place=schedule.place,
        poison=schedule.poison,
    )
    return Buffer("", guarded, is_output=True)


def _alignment(dtype: mx.Dtype, base_alignment: int | None) -> int:
    return base_alignment or (16 if dtype.size == 1 else dtype.size)


def _to_bytes(array: mx.array) -> np.ndarray:
    """The array's elements as uint8 [elements, bytes of an element], in row-major order."""
    flat = mx.contiguous(array).reshape(-1)
    whole = np.array(flat.view(mx.uint16) if array.dtype == mx.bfloat16 else flat)
    return np.ascontiguousarray(whole).view(np.uint8).reshape(array.size, array.dtype.size)


def _to_array(raw: bytes, shape: Sequence[int], dtype: mx.Dtype) -> mx.array:
    carried = mx.array(np.frombuffer(raw, _CARRIERS[dtype]).reshape(shape))
    return carried.view(dtype) if carried.dtype != dtype else carried
