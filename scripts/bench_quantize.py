"""Speed and error of the quantisers on Gaussian weights; one JSON line last.

usage: python scripts/bench_quantize.py [--formats IQ2_XS Q2_0] [--rows 512] [--columns 2560]

The quantisers' tests run first, and no speed is printed while they fail. Errors are relative RMS: with equal
importances, and with log-normal ones in the norm that these weight. Processor time is given beside wall time, since
they differ on a busy machine; with a GPU only wall time counts.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path

import mlx.core as mx

from custom_kernels.ggml_blocks import QUANTIZABLE, BlockFormat, format_by_name, naive_dequantize, quantize

ROOT = Path(__file__).resolve().parent.parent


def measure(format: BlockFormat, rows: int, columns: int) -> dict[str, float | str]:
    """Quantise a seeded matrix three times, the fastest counts: errors and weights per second."""
    x = mx.random.normal((rows, columns), key=mx.random.key(0))
    importance = mx.exp(mx.random.normal((columns,), key=mx.random.key(1)))
    mx.eval(x, importance)
    quantize(x[:1], format)  # tables
    times = []
    for _ in range(3):
        wall, processor = time.perf_counter(), time.process_time()
        packed = quantize(x, format)
        times.append((time.perf_counter() - wall, time.process_time() - processor))
    wall_s, processor_s = map(min, zip(*times, strict=True))
    weighted = quantize(x, format, importance)
    return {
        "format": format.name,
        "million_weights_per_s": round(x.size / wall_s / 1e6, 2),
        "million_weights_per_processor_s": round(x.size / processor_s / 1e6, 2),
        "error": round(_error(x, packed, format, mx.array(1.0)), 4),
        "weighted_error": round(_error(x, weighted, format, importance), 4),
    }


def _error(x: mx.array, packed: mx.array, format: BlockFormat, importance: mx.array) -> float:
    difference = x - naive_dequantize(packed, format)
    return ((importance * difference**2).sum() / (importance * x**2).sum()).item() ** 0.5


def main(argv: list[str] | None = None) -> None:
    """Test, measure every format, print a table and a JSON line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--formats", nargs="+", choices=QUANTIZABLE, default=QUANTIZABLE)
    parser.add_argument("--rows", type=int, default=512)
    parser.add_argument("--columns", type=int, default=2560)
    args = parser.parse_args(argv)
    tests = [sys.executable, "-m", "pytest", "-q", "tests/kernels/test_quantize.py"]
    subprocess.run(tests, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    results = [measure(format_by_name(name), args.rows, args.columns) for name in args.formats]
    for result in results:
        print(
            "{format:8} {million_weights_per_s:7} M/s  {million_weights_per_processor_s:7} M/s of processor time"
            "  error {error:.4f}  weighted {weighted_error:.4f}".format(**result)
        )
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    machine = {"machine": platform.machine(), "cores": os.cpu_count(), "device": str(mx.default_device())}
    versions = {"mlx": version("mlx"), "commit": commit.stdout.strip()}
    print(json.dumps({"bench": "quantize", **machine, **versions, "results": results}))


if __name__ == "__main__":
    main()
