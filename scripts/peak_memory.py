"""What a streamed model takes in memory, beside its plan: a prompt of random tokens, then single tokens.

usage: python scripts/peak_memory.py MODEL --expert-slots N [--prompt 16] [--steps 3] [--context N]
           [--prefill-step-size N] [--tokenizer]

Prints the plan's parts, peaks of MLX's memory (arrays and cache) and of the process, and one JSON line with the
statistics of streaming. A full measurement fills the context that is planned for: --prompt 32750, or a smaller
--context of as many tokens as are run, which is then the model's longest. --tokenizer loads the model's tokenizer too,
which the plan counts with the process.
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
import threading
import time

import mlx.core as mx
import numpy as np

from mlx_moe import load, load_model
from mlx_moe.config import ModelConfig
from mlx_moe.generation import generate_tokens
from mlx_moe.model_sizes import local_sizes
from mlx_moe.paging.plan import Machine, MemoryPlan, Wanted, plan_memory
from mlx_moe.platform import device, system
from mlx_moe.runtime import model_folder

SAMPLE_S = 0.005


class Peak(threading.Thread):
    """The most that MLX's arrays and cache together took, sampled."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.most_bytes = 0
        self.ended = threading.Event()

    def run(self) -> None:
        """Until ``ended``."""
        while not self.ended.wait(SAMPLE_S):
            active, cached = mx.get_active_memory(), mx.get_cache_memory()
            if mx.get_active_memory() == active:  # or what went to the cache meanwhile would be counted twice
                self.most_bytes = max(self.most_bytes, active + cached)


def plan(args: argparse.Namespace, config: ModelConfig, item_bytes: int) -> MemoryPlan:
    """For what will be run, and no more."""
    here = device()
    wanted = Wanted(
        expert_slots=args.expert_slots,
        context=args.context,
        snapshots=0,
        prefill_step_size=args.step,
        item_bytes=item_bytes,
    )
    sizes = local_sizes(model_folder(args.model), item_bytes).of(config)
    return plan_memory(sizes, Machine(here.memory_bytes, here.working_set_bytes), wanted)


def resident_peak() -> int:
    """Of this process, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def main(argv: list[str] | None = None) -> None:
    """Load, generate, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--expert-slots", type=int, required=True)
    parser.add_argument("--prompt", type=int, default=16)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--context", type=int, default=Wanted.context)
    parser.add_argument("--prefill-step-size", type=int, default=Wanted.prefill_step_size)
    parser.add_argument("--tokenizer", action="store_true", help="load the tokenizer too, as users do")
    args = parser.parse_args(argv)
    args.step = min(args.prompt, args.prefill_step_size)
    mx.eval(mx.random.normal((64, 64)) @ mx.ones((64, 64)))  # so that what the device's libraries take is there
    before = resident_peak()
    peak = Peak()
    peak.start()
    start = time.perf_counter()
    loading = load if args.tokenizer else load_model
    options = {"expert_slots": args.expert_slots, "prefill_step_size": args.step}
    model, _beside = loading(args.model, model_config={"max_position_embeddings": args.context}, **options)
    loaded_s, loaded_bytes = time.perf_counter() - start, mx.get_active_memory()
    item_bytes = 4 if mx.default_device() == mx.cpu else 2
    planned = plan(args, model.config, item_bytes)
    with model:
        ids = np.random.default_rng(0).integers(0, model.config.vocab_size, args.prompt).tolist()
        start = time.perf_counter()
        steps = generate_tokens(ids, model, max_tokens=args.steps, prefill_step_size=args.step)
        tokens = [token for token, _ in steps]
        spent_s, stats = time.perf_counter() - start, model.experts_stats
    peak.ended.set()
    peak.join()
    found = {
        "planned_gpu_bytes": planned.gpu_bytes,
        "planned_bytes": planned.total_bytes,
        "loaded_bytes": loaded_bytes,
        "peak_mlx_bytes": peak.most_bytes,
        "peak_active_bytes": mx.get_peak_memory(),
        "before_resident_bytes": before,
        "peak_resident_bytes": resident_peak(),
    }
    for name, value in {**planned.parts, **found}.items():
        print(f"{name:24} {value / 1e9:8.3f} GB")
    print(f"loaded in {loaded_s:.1f} s, {args.prompt} + {len(tokens)} tokens in {spent_s:.1f} s")
    print(json.dumps({"system": system(), "parts": planned.parts, **found, "experts": stats.as_dict()}))


if __name__ == "__main__":
    main()
