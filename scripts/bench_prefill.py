"""Prompt speed and memory against prompt length, on real text; one JSON line last.

usage: python scripts/bench_prefill.py [--model DIR] [--lengths 1024 2048 4096 8192 16384]

Each length runs in a process of its own, so that peaks do not mix. The text is the source of Python's standard library.
Peak memory is MLX's own count of live arrays, weights included.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from pathlib import Path


def library_text() -> str:
    """Sources of the standard library, joined in the order of their names."""
    return "\n".join(path.read_text(encoding="utf-8") for path in sorted(Path(os.__file__).parent.glob("*.py")))


def measure(model_path: str | None, length: int, step: int) -> dict[str, float]:
    """Prefill one prompt; returns seconds, tokens per second and memory in MB."""
    import mlx.core as mx

    from mlx_moe import load
    from mlx_moe.generation import process_prompt

    model, tokenizer = load(model_path)
    text = library_text()
    ids = tokenizer.encode(text[: 8 * length])[:length]
    process_prompt(ids[:64], model, model.make_cache())
    mx.clear_cache()
    weights = mx.get_active_memory()
    mx.reset_peak_memory()
    cache = model.make_cache()
    started = time.perf_counter()
    process_prompt(ids, model, cache, step)
    seconds = time.perf_counter() - started
    return {
        "tokens": len(ids),
        "seconds": round(seconds, 3),
        "tokens_per_s": round(len(ids) / seconds, 1),
        "weights_mb": round(weights / 1e6, 1),
        "peak_mb": round(mx.get_peak_memory() / 1e6, 1),
        "cache_mb": round(sum(layer.nbytes for layer in cache) / 1e6, 2),
    }


def main(argv: list[str] | None = None) -> None:
    """Run every length and print a table and a JSON line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="model folder (default: the demonstration model)")
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 2048, 4096, 8192, 16384])
    parser.add_argument("--prefill-step-size", type=int, default=2048)
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.one:
        print(json.dumps(measure(args.model, args.one, args.prefill_step_size)))
        return
    rows = []
    for length in args.lengths:
        command = [sys.executable, __file__, "--one", str(length), "--prefill-step-size", str(args.prefill_step_size)]
        command += ["--model", args.model] if args.model else []
        rows.append(
            json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[-1])
        )
        print(
            "{tokens:>6} tokens  {tokens_per_s:>8} tok/s  peak {peak_mb:>7} MB  caches {cache_mb:>6} MB".format(
                **rows[-1]
            )
        )
    from importlib.metadata import version

    machine = {"machine": platform.machine(), "cores": os.cpu_count(), "mlx": version("mlx")}
    print(json.dumps({"bench": "prefill", **machine, "step": args.prefill_step_size, "rows": rows}))


if __name__ == "__main__":
    main()
