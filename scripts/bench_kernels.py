"""GPU time of the kernels at the real model's shapes, one token, beside the mx ops they stand for; one JSON line last.

usage: python scripts/bench_kernels.py [--only WORD] [--links 256]

Every kernel passes its check (custom_kernels/checks.py) first, and no speed is printed while one fails.

What is measured is GPU time in a warm stream. A chain of calls, each waiting for the one before, is queued behind a
plug: one thread that counts for long enough that the whole chain is queued before the first call starts, so that
neither Python nor launching counts. The same chain of kernels that do nothing is taken off. Cold calls go round at
least 1 GB of distinct weights, more than any cache; warm ones repeat one set. The ceiling of a kernel is its bytes at
the rate of a large copy, measured in the same run.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from pathlib import Path

os.environ.setdefault("MLX_MAX_MB_PER_BUFFER", "1000000")  # as mlx_moe sets it (mlx_moe/environment.py)

import mlx.core as mx
import mlx.nn as nn

from custom_kernels import dispatch
from custom_kernels.checks import check, run_check
from custom_kernels.dequant_gemv import Arena, Matrix, block_gemv, expert_combine, expert_down, expert_gate_up
from custom_kernels.gdn_step import Inputs, Spec, Weights, gdn_step
from custom_kernels.ggml_blocks import format_by_name
from custom_kernels.moce_route import Policy, moce_route
from custom_kernels.portable import Geometry, Launch, PortableKernel
from custom_kernels.slots import NO_SLOT, PAGE_BYTES

H, WIDTH, EXPERTS, TOP_K = 2560, 640, 512, 10
COLD_BYTES = 1 << 30
PLUG_MS = 12.0

Call = Callable[[int, mx.array], mx.array]
"""(which set of weights, the chained input) -> any output."""


@dataclass(frozen=True)
class Case:
    """One op at one size.

    Attributes:
        name: of the row.
        call: runs it; its input must be the chained array, which is ``start`` at first.
        kernels: how many dispatches of ours it is, each paired with one that does nothing.
        n_bytes: what one call must move, 0 for what is bound by latency.
        sets: of weights to go round.
        checks: (op, variant) that must be right first.
    """

    name: str
    call: Call
    start: mx.array
    kernels: int
    n_bytes: int = 0
    sets: int = 1
    checks: Sequence[tuple[str, str]] = ()


TIE = PortableKernel("tie", ["x", "before"], ["y"], "if (gid.x < SIZE) y[gid.x] = x[gid.x];")
PLUG = PortableKernel(
    "plug",
    ["count"],
    ["y"],
    """
  float x = 0.0f;
  if (gid.x == 0)
    for (int i = 0; i < count[0]; ++i) x = fma(x, 0.5f, 1.0f);
  if (gid.x < 8) y[gid.x] = x > 3.0f ? 1.0f : 0.0f;
""",
)
NOTHING = PortableKernel("nothing", ["x", "before"], ["y"], "if (gid.x < 8) y[gid.x] = T(0);")


def tie(x: mx.array, before: mx.array) -> mx.array:
    """A copy of x that is made after ``before``."""
    size = -(-x.size // 256)
    launch = Launch(TIE, [x, before], [("SIZE", x.size)], Geometry.of_groups((size, 1, 1)), [x.shape], [x.dtype])
    return launch.run(backend())[0]


def nothing(x: mx.array, before: mx.array) -> mx.array:
    """8 zeros, after x and ``before``, by one dispatch."""
    launch = Launch(NOTHING, [x, before], [("T", x.dtype)], Geometry.of_groups((1, 1, 1)), [(8,)], [x.dtype])
    return launch.run(backend())[0]


def backend() -> str:
    """ "metal" or "cuda"."""
    return dispatch.device_choice().backend


def plug(rounds: int) -> mx.array:
    """8 zeros, after that many steps of one thread."""
    count = mx.array([rounds] * 8, dtype=mx.int32)
    return Launch(PLUG, [count], [], Geometry.of_groups((1, 1, 1), 32), [(8,)], [mx.float32]).run(backend())[0]


@cache
def plug_rounds() -> int:
    """As many as take ``PLUG_MS``."""
    seconds = []
    for _ in range(4):
        started = time.perf_counter()
        mx.eval(plug(1 << 22))
        seconds.append(time.perf_counter() - started)
    return int((1 << 22) * PLUG_MS / 1e3 / min(seconds))


def chain_s(step: Callable[[int, mx.array], mx.array], start: mx.array, links: int) -> float:
    """Seconds for the plug and then ``links`` times (tie, step)."""
    last = plug(plug_rounds())
    for i in range(links):
        last = step(i, tie(start, last))
    started = time.perf_counter()
    mx.eval(last)
    return time.perf_counter() - started


def gpu_us(case: Case, links: int, sets: int, rounds: int = 12) -> float:
    """Microseconds of GPU per call, above kernels that do nothing; the fastest of each counts."""

    def idle(_: int, x: mx.array) -> mx.array:
        out = x
        for _ in range(case.kernels):
            out = nothing(x, out)
        return out

    def step(i: int, x: mx.array) -> mx.array:
        return case.call(i % sets, x)

    busy, free = (min(chain_s(f, case.start, links) for _ in range(rounds)) for f in (step, idle))
    return (busy - free) / links * 1e6


def copy_bytes_per_s() -> float:
    """Of a large copy, reading and writing counted."""
    x = mx.zeros((1 << 30,), dtype=mx.float32)
    mx.eval(x)
    times = []
    for _ in range(5):
        started = time.perf_counter()
        mx.eval(x + 1)
        times.append(time.perf_counter() - started)
    return 2 * x.nbytes / min(times)


def random_bytes(count: int) -> mx.array:
    """uint8 [count] without pattern; never a large fp16 scale or NaN."""
    words = mx.random.randint(0, 1 << 30, (-(-count // 64), 16), dtype=mx.uint32) & 0x3F3F3F3F
    return mx.view(words, mx.uint8).reshape(-1)[:count]


def experts() -> list[Case]:
    """Ten experts of IQ2_XS and IQ4_NL out of an arena; ten of MLX's 4-bit and 2-bit ones."""
    iq2, iq4 = format_by_name("IQ2_XS"), format_by_name("IQ4_NL")
    gate = Matrix(iq2, WIDTH, H, 0)
    up = Matrix(iq2, WIDTH, H, WIDTH * gate.row_bytes)
    down = Matrix(iq4, H, WIDTH, 2 * WIDTH * gate.row_bytes)
    record = down.offset + H * down.row_bytes
    pages = -(-record // PAGE_BYTES)
    sets = -(-COLD_BYTES // (TOP_K * record))
    arena = Arena((random_bytes(sets * TOP_K * pages * PAGE_BYTES),))
    words = [mx.array([[pages * (TOP_K * s + j) for j in range(TOP_K)]], dtype=mx.uint32) for s in range(sets)]
    weights, shared = mx.full((1, TOP_K), 0.1), mx.zeros((1, H))
    mx.eval(arena.chunks, arena.base_array, words, weights, shared)
    h = mx.random.normal((1, TOP_K, WIDTH))
    partials = mx.random.normal((1, TOP_K, H))

    def both(s: int, x: mx.array) -> mx.array:
        partial = expert_down(expert_gate_up(x, words[s], arena, gate, up), words[s], arena, down)
        return expert_combine(partial, weights, shared)

    up_bytes, down_bytes = TOP_K * down.offset, TOP_K * (record - down.offset)
    checks = [("expert_gate_up", "IQ2_XS+IQ2_XS"), ("expert_down", "IQ4_NL"), ("expert_combine", "")]
    x = mx.random.normal((1, H))
    return [
        Case("experts, all three", both, x, 3, up_bytes + down_bytes, sets, checks),
        Case("expert_gate_up", lambda s, v: expert_gate_up(v, words[s], arena, gate, up), x, 1, up_bytes, sets),
        Case("expert_down", lambda s, v: expert_down(v, words[s], arena, down), h, 1, down_bytes, sets),
        Case("expert_combine", lambda _, v: expert_combine(v, weights, shared), partials, 1, partials.nbytes),
    ]


def mlx_experts(bits: int) -> Case:
    """The same with ``gather_qmm``, as mlx-lm's SwitchGLU does it."""
    sets = -(-COLD_BYTES * 8 // (3 * WIDTH * H * bits * TOP_K))
    count = TOP_K * sets
    sizes = {"gate": (WIDTH, H), "up": (WIDTH, H), "down": (H, WIDTH)}
    parts = {
        name: mx.quantize(mx.random.normal((count, *size)).astype(mx.bfloat16), bits=bits)
        for name, size in sizes.items()
    }
    ids = [mx.arange(TOP_K * s, TOP_K * s + TOP_K, dtype=mx.uint32)[None] for s in range(sets)]
    scores = mx.full((1, TOP_K, 1), 0.1, dtype=mx.bfloat16)
    mx.eval(parts, ids, scores)

    def product(name: str, x: mx.array, s: int) -> mx.array:
        return mx.gather_qmm(x, *parts[name], rhs_indices=ids[s], transpose=True, bits=bits)

    def call(s: int, x: mx.array) -> mx.array:
        v = x[:, None, None]
        h = nn.silu(product("gate", v, s)) * product("up", v, s)
        return (product("down", h, s).squeeze(-2) * scores).sum(axis=-2)

    n_bytes = sum(a.nbytes for part in parts.values() for a in part) // sets
    start = mx.random.normal((1, H)).astype(mx.bfloat16)
    return Case(f"mx: gather_qmm {bits}-bit", call, start, 3, n_bytes, sets)


def gated_delta() -> list[Case]:
    """One GDN layer between its projections; the state goes round."""
    spec = Spec(key_heads=16, value_heads=48, dk=128, dv=128)
    sets = 24
    states = [mx.random.normal((1, 48, 128, 128)) for _ in range(sets)]
    dtype = mx.bfloat16
    history, z = (mx.random.normal((1, n, c)).astype(dtype) for n, c in ((3, spec.channels), (1, 48 * 128)))
    a, b = (mx.random.normal((1, 1, 48)).astype(dtype) for _ in range(2))
    weights = Weights(mx.random.normal((spec.channels, 4)), mx.zeros((48,)), mx.zeros((48,)), mx.ones((128,)))
    qkv = mx.random.normal((1, 1, spec.channels)).astype(dtype)
    mx.eval(states, history, z, a, b, weights, qkv)

    def ours(s: int, x: mx.array) -> mx.array:
        return gdn_step(Inputs(x, z, a, b, history, states[s]), weights, spec)[0]

    n_bytes = 2 * states[0].nbytes
    cases = [Case("gdn_step", ours, qkv, 1, n_bytes, sets, [("gdn_step", ""), ("gdn_commit", "")])]
    conv = weights.conv.astype(dtype)[:, :, None]

    def theirs(s: int, x: mx.array) -> mx.array:
        y = nn.silu(mx.conv1d(mx.concatenate([history, x], axis=1), conv, groups=spec.channels))
        q, k, v = (p.reshape(1, 1, -1, 128) for p in mx.split(y, [2048, 4096], axis=-1))
        q = mx.fast.rms_norm(q, None, 1e-6) * 128**-1.0
        k = mx.fast.rms_norm(k, None, 1e-6) * 128**-0.5
        decay = mx.exp(-mx.exp(weights.a_log) * nn.softplus(a + weights.dt_bias))
        out, _ = mx.fast.gated_delta_update(q, k, v, decay, mx.sigmoid(b), states[s])
        return mx.fast.rms_norm(out, weights.norm, 1e-6).reshape(z.shape) * mx.sigmoid(z)

    return [*cases, Case("mx: conv1d, norms, gated_delta_update", theirs, qkv, 1, n_bytes, sets)]


def routing() -> list[Case]:
    """512 experts, ten of them, with and without a preference for residents."""
    logits = mx.random.normal((1, EXPERTS))
    words = mx.where(mx.random.uniform(shape=(EXPERTS,)) < 0.3, mx.arange(EXPERTS, dtype=mx.uint32), NO_SLOT)
    mx.eval(logits, words)

    def ours(policy: Policy) -> Call:
        return lambda _, x: moce_route(x, words, TOP_K, policy).weights

    def theirs(_: int, x: mx.array) -> mx.array:
        scores = mx.softmax(x, axis=-1, precise=True)
        ids = mx.argpartition(scores, kth=-TOP_K, axis=-1)[..., -TOP_K:]
        best = mx.take_along_axis(scores, ids, axis=-1)
        return best / best.sum(axis=-1, keepdims=True)

    return [
        Case("moce_route, plain", ours(Policy(max_rank=TOP_K)), logits, 1, checks=[("moce_route", "")]),
        Case("moce_route, MoCE 24", ours(Policy(0.85, 3, 24)), logits, 1),
        Case("mx: softmax, argpartition", theirs, logits, 1),
    ]


def dense(name: str, rows: int, columns: int) -> list[Case]:
    """A dense matrix, and MLX's 8-bit one of the same shape."""
    format = format_by_name(name)
    row_bytes = format.row_bytes(columns)
    sets = -(-COLD_BYTES // (rows * row_bytes))
    packed = [random_bytes(rows * row_bytes).reshape(rows, row_bytes) for _ in range(sets)]
    x = mx.random.normal((1, columns)).astype(mx.bfloat16)
    theirs = [mx.quantize(mx.random.normal((rows, columns)).astype(mx.bfloat16), bits=8) for _ in range(sets)]
    mx.eval(packed, theirs, x)
    shape = f"{rows} x {columns}"
    their_bytes = sum(part.nbytes for part in theirs[0])
    return [
        Case(
            f"block_gemv {name} {shape}",
            lambda s, v: block_gemv(v, packed[s], format),
            x,
            1,
            rows * row_bytes,
            sets,
            [("block_gemv", name)],
        ),
        Case(
            f"mx: quantized_matmul 8-bit {shape}",
            lambda s, v: mx.quantized_matmul(v, *theirs[s], transpose=True, bits=8),
            x,
            1,
            their_bytes,
            sets,
        ),
    ]


GROUPS: dict[str, Callable[[], list[Case]]] = {
    "experts": lambda: [*experts(), mlx_experts(4), mlx_experts(2)],
    "gdn": gated_delta,
    "route": routing,
    "dense": lambda: [*dense("Q8_0", 10240, H), *dense("Q6_K", 10240, H)[:1], *dense("IQ2_XS", 10240, H)[:1]],
}


def row_of(case: Case, links: int, copy_rate: float) -> dict[str, float | str]:
    """Check, then measure."""
    for op, variant in case.checks:
        verdict = run_check(check(op, variant), backend())
        if not verdict.ok:
            sys.exit(f"{op} {variant} is wrong here ({verdict.message}): no speed is measured")
    cold, warm = gpu_us(case, links, case.sets), gpu_us(case, links, 1)
    row: dict[str, float | str] = {"name": case.name, "cold_us": round(cold, 2), "warm_us": round(warm, 2)}
    if case.n_bytes:
        ceiling = case.n_bytes / copy_rate * 1e6
        rates = {"gb_per_s": round(case.n_bytes / cold / 1e3), "ceiling_us": round(ceiling, 2)}
        row |= {"mb": round(case.n_bytes / 1e6, 2), **rates, "of_ceiling": round(ceiling / cold, 2)}
    return row


def main(argv: list[str] | None = None) -> None:
    """Measure every group, print a table and a JSON line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=GROUPS, nargs="+", default=list(GROUPS))
    parser.add_argument("--links", type=int, default=256, help="calls in a chain (default 256)")
    args = parser.parse_args(argv)
    if backend() == "reference":
        sys.exit(f"there are no kernels to measure: {dispatch.device_choice().reason}")
    copy_rate = copy_bytes_per_s()
    print(f"copy {copy_rate / 1e12:.2f} TB/s, plug of {plug_rounds()} steps")
    rows = []
    for group in args.only:
        for case in GROUPS[group]():
            rows.append(row_of(case, args.links, copy_rate))
            print("{name:42} cold {cold_us:8} us  warm {warm_us:8} us".format(**rows[-1]), end="")
            print(
                "  {mb:7} MB {gb_per_s:6} GB/s  {of_ceiling:5} of the ceiling".format(**rows[-1])
                if case.n_bytes
                else ""
            )
        mx.clear_cache()
    root = Path(__file__).resolve().parent.parent
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=root, capture_output=True, text=True)
    machine = {"machine": platform.machine(), "device": mx.device_info().get("device_name", "")}
    versions = {"mlx": version("mlx"), "commit": commit.stdout.strip()}
    print(json.dumps({"bench": "kernels", **machine, **versions, "copy_tb_per_s": copy_rate / 1e12, "rows": rows}))


if __name__ == "__main__":
    main()
