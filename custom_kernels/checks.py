"""The check of every kernel on the machine at hand: small seeded inputs, run as a kernel and as its reference.

A kernel that is right on one chip may not compile, or be compiled wrongly, on the next; this finds out in milliseconds.
The tests go much further. A kernel is named by its op and variant: the block formats that it reads, as "IQ2_XS" or
"IQ2_XS+IQ4_NL" (gate, then up), or "".

Knows every op; no model, no disk.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import mlx.core as mx
import numpy as np

from custom_kernels.dequant_gemv import kernel as dense
from custom_kernels.dequant_gemv import reference as gemv
from custom_kernels.dequant_gemv.expert_kernel import (
    expert_combine_launch,
    expert_dequantize_launch,
    expert_down_launch,
    expert_gate_up_launch,
)
from custom_kernels.gdn_step.kernel import gdn_commit_launch, gdn_step_launch
from custom_kernels.gdn_step.reference import Inputs, Spec, Weights, naive_gdn_commit, naive_gdn_step
from custom_kernels.ggml_blocks import F8_E4M3, FORMATS, BlockFormat, format_by_name
from custom_kernels.ggml_blocks.device import has_decoder
from custom_kernels.moce_route.kernel import moce_route_launch
from custom_kernels.moce_route.reference import Policy, naive_moce_route
from custom_kernels.portable import Launch
from custom_kernels.slots import NO_SLOT, PAGE_BYTES

WINDOWS = ((1, mx.float32), (3, mx.bfloat16))
"""Tokens, and the type of what is computed in the model's type: each kernel is checked at both."""
FELLOWS = {"gdn_step": "gdn_commit", "gdn_commit": "gdn_step"}
"""Ops that must run on the same back end, since the bits of one are to be those of the other."""

_POISON = 1e9
"""What an output element holds that a kernel does not write; not a plausible value, in any type."""
_BATCHES = 3  # of timed calls, of which the fastest counts
_SCALES_AT = {"Q5_1": (0, 2), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}  # bytes of a block; elsewhere at 0
_EXACT, _FLOAT32, _WEIGHTS = 0.0, 1e-5, 1e-6


@dataclass(frozen=True, eq=False)
class Sample:
    """One launch and what it should give.

    Attributes:
        launch: of the kernel.
        reference: computes what the outputs should be, in order.
        limits: how far each output may be off, in proportion to its largest value; 0 is not at all.
        absolute: the limits are differences as they are.
    """

    launch: Launch
    reference: Callable[[], Sequence[mx.array]]
    limits: tuple[float, ...]
    absolute: bool = False

    def expected(self) -> list[mx.array]:
        """The reference's outputs, computed on the CPU."""
        with mx.stream(mx.cpu):
            out = list(self.reference())
            mx.eval(out)
        return out


@dataclass(frozen=True)
class Verdict:
    """What a check found.

    Attributes:
        ok: the kernel may be used.
        error: as ``Sample.limits`` count it, the largest of the float32 window, or the one that is too large; None
            where outputs cannot be compared.
        microseconds: per call, in a row of calls; None if not measured.
        message: in one line, why not ok; else "".
    """

    ok: bool
    error: float | None = None
    microseconds: float | None = None
    message: str = ""


@dataclass(frozen=True)
class Check:
    """The check of one kernel; ``build`` makes the sample for a window's tokens and the model's type."""

    op: str
    variant: str
    build: Callable[[int, mx.Dtype], Sample]

    @cached_property
    def samples(self) -> list[Sample]:
        """One for each of ``WINDOWS``; nothing in them is computed on a GPU."""
        with mx.stream(mx.cpu):
            samples = [self.build(*window) for window in WINDOWS]
            mx.eval([sample.launch.inputs for sample in samples])
        return samples


def check(op: str, variant: str = "") -> Check:
    """The check of one kernel; raises ValueError naming an op or variant that has none."""
    if op not in _BUILDERS:
        raise ValueError(f"op {op!r} has no kernel (ops: {', '.join(_BUILDERS)})")
    build, count = _BUILDERS[op]
    formats = [format_by_name(name) for name in variant.split("+")] if variant else []
    if len(formats) != count or not all(map(has_decoder, formats)):
        raise ValueError(f"{op} has no kernel {variant!r}; needed: {count} block format(s) that kernels can read")
    return Check(op, variant, lambda T, dtype: build(T, dtype, *formats))


def every_kernel() -> Iterator[tuple[str, str]]:
    """(op, variant) of every kernel; ops that read two formats with both alike."""
    yield from ((op, "") for op, (_, count) in _BUILDERS.items() if count == 0)
    for format in filter(has_decoder, (*FORMATS, F8_E4M3)):
        yield from ((op, "+".join([format.name] * count)) for op, (_, count) in _BUILDERS.items() if count)


def kernel_hash(check: Check, backend: str) -> str:
    """sha256 over what the check compiles and how it is launched: texts, names, template, grid."""
    digest = hashlib.sha256()
    for launch in (sample.launch for sample in check.samples):
        kernel = launch.kernel
        types = [array.dtype for array in launch.inputs]
        call = (kernel.name, kernel.inputs, kernel.outputs, types, launch.template, launch.geometry)
        for part in (*kernel.text(backend), repr(call)):
            digest.update(part.encode() + b"\0")
    return digest.hexdigest()


def run_check(check: Check, backend: str, calls: int = 0) -> Verdict:
    """Run a kernel on "metal" or "cuda" and compare. calls: how many to time in a row, 0 for none.

    A kernel that does not compile or launch (MLX raises RuntimeError), leaves something out, or gives what is not
    finite has failed, like one that is wrong.
    """
    errors = []
    for (tokens, dtype), sample in zip(WINDOWS, check.samples, strict=True):
        where = f"window of {tokens}, {str(dtype).removeprefix('mlx.core.')}"
        want = sample.expected()
        try:
            got = sample.launch.run(backend, _POISON)
            mx.eval(got)
        except RuntimeError as error:
            return Verdict(False, message=f"{where}: {one_line(str(error))}")
        error, problem = _compare(sample, got, want)
        if problem:
            return Verdict(False, error, message=f"{where}: {problem}")
        errors.append(error)
    launch = check.samples[0].launch
    return Verdict(True, errors[0], _microseconds(lambda: launch.run(backend), calls) if calls else None)


def time_reference(check: Check, calls: int) -> float:
    """Microseconds per call of the reference on the CPU, for the first of ``WINDOWS``."""
    with mx.stream(mx.cpu):
        return _microseconds(check.samples[0].reference, calls)


def one_line(text: str, length: int = 300) -> str:
    """Text of any origin as one line that a terminal can show."""
    return "".join(c for c in " ".join(text.split()) if c.isprintable())[:length]


def _compare(sample: Sample, got: Sequence[mx.array], want: Sequence[mx.array]) -> tuple[float | None, str]:
    """The largest error of all outputs, and what is wrong with the first that is wrong."""
    worst = 0.0
    for name, limit, a, b in zip(sample.launch.kernel.outputs, sample.limits, got, want, strict=True):
        a, b = _plain(a), _plain(b)
        if not np.isfinite(a).all():
            return None, f"{name} holds NaN or infinity"
        scale = 1.0 if sample.absolute else float(np.abs(b).max()) or 1.0
        error = float(np.abs(a - b).max()) / scale
        if error > limit:
            return error, f"{name} is off by {error:.1e} (allowed: {limit:g})"
        worst = max(worst, error)
    return worst, ""


def _plain(x: mx.array) -> np.ndarray:
    """As float64, which holds every value of the outputs' types."""
    with mx.stream(mx.cpu):
        return np.array(x.astype(mx.float32) if mx.issubdtype(x.dtype, mx.floating) else x).astype(np.float64)


def _microseconds(call: Callable[[], Sequence[mx.array]], calls: int) -> float:
    """Per call, ``calls`` of them evaluated together, so that they share one wait; the fastest batch."""
    times = []
    for _ in range(_BATCHES):
        start = time.perf_counter()
        mx.eval([call() for _ in range(calls)])
        times.append(time.perf_counter() - start)
    return min(times) / calls * 1e6


def _normal(rng: np.random.Generator, *shape: int, scale: float = 1.0, dtype: mx.Dtype = mx.float32) -> mx.array:
    return mx.array((scale * rng.standard_normal(shape)).astype(np.float32)).astype(dtype)


def _width(*formats: BlockFormat) -> int:
    """Weights per row: lanes take several groups, and where the blocks allow it not all lanes as many."""
    return 640 if all(640 % format.block_weights == 0 for format in formats) else 768


def _rows(*formats: BlockFormat) -> int:
    """Of a matrix: neither a multiple of a simdgroup's rows nor of a threadgroup's, and more than share a scale."""
    return 19 + max(format.tile for format in formats)


def _scales(rng: np.random.Generator, format: BlockFormat, rows: int, columns: int, dtype: mx.Dtype) -> mx.array | None:
    """Of formats that keep them apart: between 0.005 and 0.02 of either sign, in ``dtype``."""
    if not format.tile:
        return None
    shape = format.scale_shape(rows, columns)
    return mx.array((rng.uniform(0.005, 0.02, shape) * rng.choice([-1, 1], shape)).astype(np.float32)).astype(dtype)


def random_rows(rng: np.random.Generator, format: BlockFormat, rows: int, columns: int) -> np.ndarray:
    """[rows, row_bytes] uint8: any payload but NaN, with fp16 scales between 0.005 and 0.02 of either sign."""
    if format.tile:
        codes = rng.integers(0, 256, (rows, columns), dtype=np.uint8)
        return codes - (codes & 127 == 127)
    if format.block_weights == 1:
        values = rng.standard_normal((rows, columns)).astype(np.float16 if format.name == "F16" else np.float32)
        if format.name == "BF16":
            values = (values.view(np.uint32) >> 16).astype(np.uint16)
        return values.view(np.uint8)
    blocks = rng.integers(0, 256, (rows, columns // format.block_weights, format.block_bytes), dtype=np.uint8)
    for at in _SCALES_AT.get(format.name, (0,)):
        scale = rng.uniform(0.005, 0.02, blocks.shape[:2]) * rng.choice([-1, 1], blocks.shape[:2])
        halves = scale.astype(np.float16).view(np.uint16)
        if format.name == "IQ1_M":  # four bits each in the last four words
            nibbles = halves[..., None] >> np.arange(0, 16, 4, dtype=np.uint16) & 15
            blocks[..., 49::2] = blocks[..., 49::2] & 15 | (nibbles << 4).astype(np.uint8)
        else:
            blocks[..., at], blocks[..., at + 1] = halves & 255, halves >> 8
    return blocks.reshape(rows, -1)


def _dense(rng: np.random.Generator, format: BlockFormat, dtype: mx.Dtype) -> tuple[mx.array, mx.array | None]:
    """A matrix's rows, and its scales if they lie apart."""
    shape = _rows(format), _width(format)
    return mx.array(random_rows(rng, format, *shape)), _scales(rng, format, *shape, dtype)


def _block_gemv(T: int, dtype: mx.Dtype, format: BlockFormat) -> Sample:
    rng = np.random.default_rng(T)
    w, scales = _dense(rng, format, dtype)
    x = _normal(rng, T, _width(format), dtype=dtype)
    launch = dense.block_gemv_launch(x, w, format, scales=scales)
    return Sample(launch, lambda: [gemv.naive_block_gemv(x, w, format, scales=scales)], (_rounded(dtype),))


def _block_dequantize(T: int, dtype: mx.Dtype, format: BlockFormat) -> Sample:
    w, scales = _dense(np.random.default_rng(T), format, dtype)
    launch = dense.block_dequantize_launch(w, format, dtype, scales)
    return Sample(launch, lambda: [gemv.naive_block_dequantize(w, format, dtype, scales)], (_EXACT,))


def _arena(
    rng: np.random.Generator, dtype: mx.Dtype, *formats: BlockFormat
) -> tuple[gemv.Arena, list[int], list[gemv.Matrix]]:
    """Four records with a matrix of each format, in two chunks; their slot words; where the matrices are in a record.

    Bytes outside the records are 255. dtype: of scales that lie apart.
    """
    matrices, end = _matrices(dtype, *formats)
    pages, bases = -(-end // PAGE_BYTES), (0, 4096)
    chunks = [np.full(base + 2 * pages * PAGE_BYTES, 255, dtype=np.uint8) for base in bases]
    words = [chunk << 28 | record * pages for chunk in range(2) for record in range(2)]
    for word in words:
        chunk, first = word >> 28, bases[word >> 28] + (word & 0x0FFFFFFF) * PAGE_BYTES
        for matrix in matrices:
            shape = matrix.rows, matrix.columns
            rows = random_rows(rng, matrix.format, *shape).reshape(-1)
            chunks[chunk][first + matrix.offset :][: rows.size] = rows
            if matrix.scales:
                scales = np.array(_scales(rng, matrix.format, *shape, dtype).view(mx.uint8)).reshape(-1)
                chunks[chunk][first + matrix.scales.offset :][: scales.size] = scales
    return gemv.Arena(tuple(map(mx.array, chunks)), bases), words, matrices


def _matrices(dtype: mx.Dtype, *formats: BlockFormat) -> tuple[list[gemv.Matrix], int]:
    """Where a matrix of each format is in a record, and the record's end; everything starts at a multiple of 64."""
    rows, columns, matrices, end = _rows(*formats), _width(*formats), [], 0
    for format in formats:
        after = end + -(-rows * format.row_bytes(columns) // 64) * 64
        scales = gemv.Scales(after, dtype) if format.tile else None
        matrices.append(gemv.Matrix(format, rows, columns, end, scales))
        end = after + 64 * bool(scales)
    return matrices, end


def _slots(T: int, words: Sequence[int]) -> mx.array:
    """[T, 5] uint32: every record, and one that is missing; in another order for every token."""
    row = [*words, NO_SLOT]
    return mx.array([row[t:] + row[:t] for t in range(T)], dtype=mx.uint32)


def _expert_gate_up(T: int, dtype: mx.Dtype, *formats: BlockFormat) -> Sample:
    rng = np.random.default_rng(T)
    arena, records, (gate, up) = _arena(rng, dtype, *formats)
    x, words = _normal(rng, T, gate.columns, scale=0.1, dtype=dtype), _slots(T, records)
    launch = expert_gate_up_launch(x, words, arena, gate, up)
    return Sample(launch, lambda: [gemv.naive_expert_gate_up(x, words, arena, gate, up)], (_FLOAT32,))


def _expert_down(T: int, dtype: mx.Dtype, format: BlockFormat) -> Sample:
    rng = np.random.default_rng(T)
    arena, records, (down,) = _arena(rng, dtype, format)
    words = _slots(T, records)
    h = _normal(rng, *words.shape, down.columns)
    launch = expert_down_launch(h, words, arena, down)
    return Sample(launch, lambda: [gemv.naive_expert_down(h, words, arena, down)], (_FLOAT32,))


def _expert_dequantize(T: int, dtype: mx.Dtype, format: BlockFormat) -> Sample:
    arena, records, (matrix,) = _arena(np.random.default_rng(T), dtype, format)
    words = _slots(T, records).reshape(-1)
    launch = expert_dequantize_launch(words, arena, matrix, dtype)
    return Sample(launch, lambda: [gemv.naive_expert_dequantize(words, arena, matrix, dtype)], (_EXACT,))


def _expert_combine(T: int, dtype: mx.Dtype) -> Sample:
    rng = np.random.default_rng(T)
    partials, weights = _normal(rng, T, 10, 300), mx.array(rng.dirichlet(np.ones(10), T).astype(np.float32))
    shared = _normal(rng, T, 300, dtype=dtype)
    launch = expert_combine_launch(partials, weights, shared)
    return Sample(launch, lambda: [gemv.naive_expert_combine(partials, weights, shared)], (_rounded(dtype),))


def _moce_route(T: int, dtype: mx.Dtype) -> Sample:
    """Logits with many ties; one token by the plain router, several by one that prefers residents."""
    rng = np.random.default_rng(T)
    logits = mx.array((np.round(rng.standard_normal((T, 300)) * 8) / 4).astype(np.float32)).astype(dtype)
    slots = rng.integers(0, 1 << 28, 300)
    words = mx.array(np.where(rng.random(300) < 0.4, slots, NO_SLOT).astype(np.uint32))
    policy = Policy(max_rank=10) if T == 1 else Policy(0.85, 3, 24)
    launch = moce_route_launch(logits, words, 10, policy)
    limits = (_EXACT, _WEIGHTS, _EXACT, _EXACT, _EXACT)
    return Sample(launch, lambda: naive_moce_route(logits, words, 10, policy), limits, absolute=True)


def _gdn(T: int, dtype: mx.Dtype) -> tuple[Inputs, Weights, Spec]:
    """A layer with heads of the published size."""
    rng = np.random.default_rng(T)
    spec, taps = Spec(key_heads=1, value_heads=3, dk=128, dv=128), 4
    heads, channels = spec.value_heads, spec.channels
    inputs = Inputs(
        qkv=_normal(rng, 1, T, channels, dtype=dtype),
        z=_normal(rng, 1, T, heads * spec.dv, dtype=dtype),
        a=_normal(rng, 1, T, heads, dtype=dtype),
        b=_normal(rng, 1, T, heads, dtype=dtype),
        history=_normal(rng, 1, taps - 1, channels, dtype=dtype),
        state=_normal(rng, 1, heads, spec.dv, spec.dk),
    )
    weights = Weights(
        conv=_normal(rng, channels, taps, scale=0.4, dtype=dtype),
        a_log=_normal(rng, heads),
        dt_bias=_normal(rng, heads),
        norm=1 + _normal(rng, spec.dv, scale=0.2),
    )
    return inputs, weights, spec


def _gdn_step(T: int, dtype: mx.Dtype) -> Sample:
    layer = _gdn(T, dtype)

    def reference() -> list[mx.array]:
        out, state, log = naive_gdn_step(*layer)
        return [out, state, *log]

    return Sample(gdn_step_launch(*layer), reference, (_rounded(dtype), *[_FLOAT32] * 4))


def _gdn_commit(T: int, dtype: mx.Dtype) -> Sample:
    """Of several tokens the last is dropped."""
    inputs, weights, spec = _gdn(T, dtype)
    log, keep = naive_gdn_step(inputs, weights, spec)[2], max(T - 1, 1)
    launch = gdn_commit_launch(inputs.state, log, keep)
    return Sample(launch, lambda: [naive_gdn_commit(inputs.state, log, keep)], (_FLOAT32,))


def _rounded(dtype: mx.Dtype) -> float:
    """The limit for outputs of this type."""
    return _FLOAT32 if dtype == mx.float32 else 1e-2


# Per op: the builder of its samples, and how many block formats it takes.
_BUILDERS: dict[str, tuple[Callable[..., Sample], int]] = {
    "gdn_step": (_gdn_step, 0),
    "gdn_commit": (_gdn_commit, 0),
    "moce_route": (_moce_route, 0),
    "expert_combine": (_expert_combine, 0),
    "block_gemv": (_block_gemv, 1),
    "block_dequantize": (_block_dequantize, 1),
    "expert_gate_up": (_expert_gate_up, 2),
    "expert_down": (_expert_down, 1),
    "expert_dequantize": (_expert_dequantize, 1),
}
