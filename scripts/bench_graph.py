"""GPU time of the kernels' CUDA text without MLX's own cost per call, for NVIDIA GPUs; one JSON line last.

usage: python scripts/bench_graph.py [--calls 50] [--rounds 25]

Needs cupy and nvcc. Each kernel's exact text, as ``Launch`` hands it to MLX, is compiled for the device and captured
``--calls`` times, one after the other, in a CUDA graph; the same graph of kernels that do nothing is taken off. Calls
go round more than 1 GB of distinct weights, more than any cache. Whether the kernels are right is for
``scripts/bench_kernels.py`` and the tests to say: nothing is checked here.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx
import numpy as np

from custom_kernels.dequant_gemv import Arena, Matrix
from custom_kernels.dequant_gemv.expert_kernel import expert_combine_launch, expert_down_launch, expert_gate_up_launch
from custom_kernels.dequant_gemv.kernel import block_gemv_launch
from custom_kernels.gdn_step import Inputs, Spec, Weights
from custom_kernels.gdn_step.kernel import gdn_step_launch
from custom_kernels.ggml_blocks import format_by_name
from custom_kernels.moce_route import Policy
from custom_kernels.moce_route.kernel import moce_route_launch
from custom_kernels.portable import Launch
from custom_kernels.slots import PAGE_BYTES

H, WIDTH, EXPERTS, TOP_K = 2560, 640, 512, 10
COLD_BYTES = 1 << 30
C_TYPES = {
    mx.float32: "float",
    mx.float16: "__half",
    mx.bfloat16: "__nv_bfloat16",
    mx.uint8: "uint8_t",
    mx.uint16: "uint16_t",
    mx.uint32: "uint32_t",
    mx.int32: "int32_t",
}


@dataclass(frozen=True)
class Case:
    """A kernel at one size.

    Attributes:
        name: of the row.
        launch: what one call is; its inputs give sizes, random bytes stand in for what is in them.
        cold: the input that every call takes from another place, None where one set is all.
        n_bytes: what one call must move; 0 for what is bound by latency.
    """

    name: str
    launch: Launch
    cold: str | None = None
    n_bytes: int = 0


def source(launch: Launch, name: str) -> str:
    """A whole CUDA file with the launch's kernel as ``name``, its template arguments as constants."""
    kernel = launch.kernel
    header, body = kernel.text("cuda")
    inputs = [f"const {C_TYPES[a.dtype]}* {n}" for n, a in zip(kernel.inputs, launch.inputs, strict=True)]
    outputs = [f"{C_TYPES[d]}* {n}" for n, d in zip(kernel.outputs, launch.output_dtypes, strict=True)]
    constants = [
        f"using {n} = {C_TYPES[v]};" if isinstance(v, mx.Dtype) else f"constexpr int {n} = {int(v)};"
        for n, v in launch.template
    ]
    return "\n".join(
        [
            "#include <cuda_fp16.h>\n#include <cuda_bf16.h>\n#include <stdint.h>",
            header,
            f'namespace kernel_ {{\nextern "C" __global__ void {name}({", ".join(inputs + outputs)}) {{',
            *constants,
            body,
            "}\n}",
        ]
    )


def compiled(case: Case, number: int, folder: Path) -> Path:
    """The cubin of a case for the first GPU."""
    text, out = folder / f"k{number}.cu", folder / f"k{number}.cubin"
    text.write_text(source(case.launch, f"k{number}"))
    command = ["nvcc", "-arch=native", "-std=c++17", "-cubin", "-o", str(out), str(text)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"nvcc does not take {case.name}: {done.stderr.strip()}")
    return out


def experts(gate_up: str, down: str) -> list[Case]:
    """Ten experts of these formats, and the sum of their outputs."""
    gate = Matrix(format_by_name(gate_up), WIDTH, H, 0)
    up = Matrix(gate.format, WIDTH, H, WIDTH * gate.row_bytes)
    out = Matrix(format_by_name(down), H, WIDTH, 2 * up.offset)
    arena, words = Arena((mx.zeros(PAGE_BYTES, dtype=mx.uint8),)), mx.zeros((1, TOP_K), dtype=mx.uint32)
    x, h = mx.zeros((1, H), dtype=mx.bfloat16), mx.zeros((1, TOP_K, WIDTH))
    up_bytes, down_bytes = TOP_K * out.offset, TOP_K * H * out.row_bytes
    return [
        Case(f"expert_gate_up {gate_up}", expert_gate_up_launch(x, words, arena, gate, up), "words", up_bytes),
        Case(f"expert_down {down}", expert_down_launch(h, words, arena, out), "words", down_bytes),
        Case("expert_combine", expert_combine_launch(mx.zeros((1, TOP_K, H)), mx.zeros((1, TOP_K)), x)),
    ]


def others() -> list[Case]:
    """The other ops, one token, and windows."""

    def zeros(*shape: int, dtype: mx.Dtype = mx.bfloat16) -> mx.array:
        return mx.zeros(shape, dtype=dtype)

    spec = Spec(key_heads=16, value_heads=48, dk=128, dv=128)
    state = zeros(1, 48, 128, 128, dtype=mx.float32)
    weights = Weights(*(zeros(*s, dtype=mx.float32) for s in ((spec.channels, 4), (48,), (48,), (128,))))
    cases = []
    for T in (1, 4, 8):
        inputs = Inputs(*(zeros(1, T, n) for n in (spec.channels, 48 * 128, 48, 48)), zeros(1, 3, spec.channels), state)
        cases.append(Case(f"gdn_step, {T} tokens", gdn_step_launch(inputs, weights, spec), "state", 2 * state.nbytes))
    words = zeros(EXPERTS, dtype=mx.uint32)
    for T in (1, 8):
        logits = zeros(T, EXPERTS, dtype=mx.float32)
        for name, policy in (("plain", Policy(max_rank=TOP_K)), ("bonus", Policy(0.85, 3, 24))):
            cases.append(Case(f"moce_route {name}, {T} tokens", moce_route_launch(logits, words, TOP_K, policy)))
    for name, T in (("Q8_0", 1), ("Q8_0", 4), ("Q8_0", 8), ("Q6_K", 1), ("BF16", 1)):
        format = format_by_name(name)
        w = zeros(10240, format.row_bytes(H), dtype=mx.uint8)
        cases.append(
            Case(f"block_gemv {name} 10240 x {H}, {T} tokens", block_gemv_launch(zeros(T, H), w, format), "w", w.nbytes)
        )
    return cases


class Bench:
    """Kernels in graphs on the first GPU."""

    def __init__(self, calls: int, rounds: int) -> None:
        import cupy

        self.cp, self.calls, self.rounds = cupy, calls, rounds
        self.stream = cupy.cuda.Stream(non_blocking=True)
        self.big = self.random(COLD_BYTES + (64 << 20))
        nothing = cupy.RawKernel('extern "C" __global__ void nothing(float* p) { if (!p) p[0] = 1; }', "nothing")
        one = cupy.zeros(64, dtype=cupy.float32)
        self.empty_us = self.us([lambda i: nothing((64,), (128,), (one,))])

    def random(self, n_bytes: int):
        """uint8 [n_bytes] without pattern; never a large fp16 scale or NaN."""
        words = self.cp.random.randint(0, 1 << 30, size=max(-(-n_bytes // 4), 16), dtype=np.int32) & 0x3F3F3F3F
        return words.view(np.uint8)

    def us(self, kernels: Sequence[Callable[[int], None]]) -> float:
        """Microseconds for these, one after the other; the median of the rounds."""
        cp = self.cp
        for kernel in kernels:
            kernel(0)
        cp.cuda.Device().synchronize()
        with self.stream:
            self.stream.begin_capture()
            for i in range(self.calls):
                for kernel in kernels:
                    kernel(i)
            graph = self.stream.end_capture()
        times = []
        for _ in range(self.rounds + 4):
            start, end = cp.cuda.Event(), cp.cuda.Event()
            start.record(self.stream)
            graph.launch(self.stream)
            end.record(self.stream)
            end.synchronize()
            times.append(cp.cuda.get_elapsed_time(start, end) * 1e3 / self.calls)
        return statistics.median(times[4:])

    def kernel(self, case: Case, function) -> Callable[[int], None]:
        """Its i-th call."""
        cp, launch = self.cp, case.launch
        names = list(launch.kernel.inputs)
        inputs = [self.random(a.nbytes) for a in launch.inputs]
        outputs = [cp.zeros(max(int(np.prod(s)), 16), dtype=cp.float32) for s in launch.output_shapes]
        for i, name in enumerate(names):
            if name.startswith("chunk"):
                inputs[i] = self.big
            elif name == "bases":
                inputs[i] = cp.zeros(8, dtype=cp.uint32)
        grid = tuple(g // t for g, t in zip(launch.geometry.grid, launch.geometry.threadgroup, strict=True))
        block = launch.geometry.threadgroup
        sets = self.sets(case, launch.inputs[names.index(case.cold)].nbytes) if case.cold else None

        def call(i: int) -> None:
            arguments = list(inputs)
            if sets is not None:
                arguments[names.index(case.cold)] = sets[i % len(sets)]
            function(grid, block, tuple(arguments + outputs))

        return call

    def sets(self, case: Case, n_bytes: int) -> list:
        """What the cold input is in turn."""
        if case.cold == "words":
            pages = 115  # the largest record of the real geometry
            order = np.random.default_rng(0).permutation(COLD_BYTES // PAGE_BYTES // pages)
            order = order[: len(order) // TOP_K * TOP_K].reshape(-1, TOP_K) * pages
            return [self.cp.asarray(row.astype(np.uint32)) for row in order]
        step = -(-n_bytes // 256) * 256
        return [self.big[i * step : i * step + n_bytes] for i in range(COLD_BYTES // step)]


def main(argv: list[str] | None = None) -> None:
    """Compile, measure, print a table and a JSON line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--calls", type=int, default=50, help="of each kernel in a graph (default 50)")
    parser.add_argument("--rounds", type=int, default=25, help="launches of each graph (default 25)")
    args = parser.parse_args(argv)
    try:
        bench = Bench(args.calls, args.rounds)
    except ImportError:
        sys.exit("this needs cupy: pip install cupy-cuda13x")
    trios = [experts("IQ2_XS", "IQ4_NL"), experts("IQ2_S", "Q2_0")]
    cases = [*(case for trio in trios for case in trio), *others()]
    rows = []
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor() as pool:
        cubins = list(pool.map(lambda n: compiled(cases[n], n, Path(folder)), range(len(cases))))
        functions = [bench.cp.RawModule(path=str(p)).get_function(p.stem) for p in cubins]
        kernels = [bench.kernel(case, f) for case, f in zip(cases, functions, strict=True)]
        for i, trio in enumerate(trios):
            name = " + ".join(case.name for case in trio)
            rows.append((name, bench.us(kernels[3 * i : 3 * i + 3]) - 3 * bench.empty_us, sum(c.n_bytes for c in trio)))
        rows += [(c.name, bench.us([k]) - bench.empty_us, c.n_bytes) for c, k in zip(cases, kernels, strict=True)]
    print(f"a kernel that does nothing: {bench.empty_us:.2f} us")
    for name, us, n_bytes in rows:
        print(f"{name:60} {us:7.2f} us" + (f" {n_bytes / us / 1e6:6.2f} TB/s" if n_bytes else ""))
    found = [{"name": name, "us": round(us, 2), "mb": round(n_bytes / 1e6, 2)} for name, us, n_bytes in rows]
    print(json.dumps({"bench": "graph", "empty_us": round(bench.empty_us, 2), "rows": found}))


if __name__ == "__main__":
    main()
