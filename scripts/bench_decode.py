"""Tokens per second of a model whose experts stream: a prompt of random tokens, then single ones; one JSON line last.

usage: python scripts/bench_decode.py MODEL [--expert-slots N | --memory 10GB] [--prompt 16] [--steps 64]
           [--no-read-ahead] [--io buffered|direct] [--io-threads 12]

Random tokens say nothing about hits on text: with random weights neither do the routers. What this shows is the time of
a token at a given hit rate, and where it goes.
"""

from __future__ import annotations

import argparse
import json
import time

import mlx.core as mx
import numpy as np

from mlx_moe import load_model
from mlx_moe.generation import generate_tokens
from mlx_moe.paging.reader import THREADS
from mlx_moe.platform import device


def main(argv: list[str] | None = None) -> None:
    """Load, generate, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--expert-slots", type=int)
    parser.add_argument("--memory")
    parser.add_argument("--io-threads", type=int, default=THREADS)
    parser.add_argument("--no-read-ahead", action="store_false", dest="read_ahead")
    parser.add_argument("--io", choices=("direct", "buffered"))
    parser.add_argument("--prompt", type=int, default=16)
    parser.add_argument("--steps", type=int, default=64)
    args = parser.parse_args(argv)
    names = ("expert_slots", "memory", "io_threads", "read_ahead", "io")
    options = {name: getattr(args, name) for name in names}
    start = time.perf_counter()
    model = load_model(args.model, **options)[0]
    loaded_s = time.perf_counter() - start
    with model:
        ids = np.random.default_rng(0).integers(0, model.config.vocab_size, args.prompt).tolist()
        times, before = [], model.experts_stats
        start = time.perf_counter()
        for _ in generate_tokens(ids, model, max_tokens=args.steps + 1):
            times.append(time.perf_counter())
            if len(times) == 1:
                before = model.experts_stats  # the prompt's share
        stats = model.experts_stats.since(before)
    spent = np.diff(times)
    steps = len(spent)
    found = {
        "device": device().name,
        "options": options,
        "loaded_s": round(loaded_s, 2),
        "prompt_tokens_per_s": round(args.prompt / (times[0] - start), 1),
        "tokens_per_s": round(steps / spent.sum(), 2),
        "token_ms": {f"{q} %": round(float(np.percentile(spent, q)) * 1e3, 2) for q in (10, 50, 90)},
        "hit_rate": round(stats.hits / max(stats.hits + stats.misses, 1), 3),
        "mb_per_token": round(stats.bytes_read / steps / 1e6, 1),
        "disk_wait_ms": round(stats.demanded_wait_ms / steps, 2),
        "device_wait_ms": round(stats.device_wait_ms / steps, 2),
        "peak_gb": round(mx.get_peak_memory() / 1e9, 2),
    }
    for name, value in found.items():
        print(f"{name:20} {value}")
    print(json.dumps({"bench": "decode", **found}))


if __name__ == "__main__":
    main()
