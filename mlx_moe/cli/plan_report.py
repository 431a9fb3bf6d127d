"""What ``mlx-moe plan`` prints: the table of memory, the verdict with its remedies, and the estimate."""

from __future__ import annotations

import argparse
import textwrap
from collections.abc import Iterator
from typing import TYPE_CHECKING

from mlx_moe.cli.info import size
from mlx_moe.machines import MACHINES
from mlx_moe.paging.device import Speeds
from mlx_moe.paging.estimate import Expectation
from mlx_moe.paging.plan import MemoryPlan, remedies
from mlx_moe.paging.sizes import key_capacity

if TYPE_CHECKING:
    from mlx_moe.description import Description

WIDTH = 80
"""Of what is printed, in columns."""
_NAMES = {
    "dense": "dense weights",
    "mtp": "draft layer",
    "kv": "keys and index keys",
    "state": "states",
    "snapshot": "snapshots",
    "workspace": "workspace",
    "row_cache": "n-gram row cache",
    "process": "Python, tokenizer",
    "arena": "experts",
}


def report(
    args: argparse.Namespace, found: Description, plan: MemoryPlan, expected: Expectation, speeds: Speeds
) -> list[str]:
    """All lines, of at most 80 columns where names and paths allow it."""
    config, drafts = plan.sizes.config, "with" if plan.sizes.drafts else "without"
    return [
        *_wrapped(args.model or "the demonstration model"),
        f"{found.kind}: {config.num_hidden_layers} layers of {config.num_experts} experts, "
        f"{config.num_experts_per_tok} per token, {drafts} draft layer",
        *_wrapped(_machine_text(args, plan)),
        "",
        *_memory(plan),
        "",
        *_wrapped(_verdict(plan)),
        *_commands(plan),
        "",
        *(_advice(plan) if plan.shortfall_bytes else _estimate(plan, expected, speeds)),
    ]


def _machine_text(args: argparse.Namespace, plan: MemoryPlan) -> str:
    machine = plan.machine
    name = MACHINES[args.machine].title if args.machine else "this machine"
    name = f"simulated, {args.simulate_ram / 1e9:.1f} GB" if args.simulate_ram else name
    if args.simulate_ram or args.machine:
        advice = f"Metal is taken to advise {machine.gpu_bytes / 1e9:.2f} GB for the GPU (75 % here, on some Macs 67 %)"
    elif machine.working_set_bytes:
        advice = f"Metal advises at most {machine.gpu_bytes / 1e9:.2f} GB for the GPU"
    else:
        advice = f"no Metal here, so 75 % are taken for the GPU: {machine.gpu_bytes / 1e9:.2f} GB"
    return f"{name}: {machine.memory_bytes / 1e9:.2f} GB of memory; {advice}"


def _memory(plan: MemoryPlan) -> Iterator[str]:
    scale, unit = (1e9, "GB") if plan.total_bytes >= 2e9 else (1e6, "MB")
    notes = _notes(plan)

    def row(name: str, count: int, note: str) -> str:
        return f"{name:<21}{count / scale:>9.2f} {unit}  {note}".rstrip()

    for name, count in plan.parts.items():
        if count:
            yield row(_NAMES[name], count, notes.get(name, ""))
    yield row("total", plan.total_bytes, f"of {plan.ceiling_bytes / scale:.2f} {unit} that may be used")
    yield row("left for the system", plan.system_bytes, "")


def _notes(plan: MemoryPlan) -> dict[str, str]:
    wanted, records, sizes = plan.wanted, plan.sizes.records, plan.sizes
    room = key_capacity(wanted.context)
    small, large = size(min(records)), size(max(records))
    each = small if small == large else f"{small} to {large}"
    return {
        "mtp": "weights and keys",
        "kv": f"{wanted.context:,} tokens" + (f"; buffers for {room:,}" if room != wanted.context else ""),
        "state": "Gated DeltaNet, convolutions",
        "snapshot": f"{wanted.snapshots} of the states",
        "workspace": f"prompts in pieces of {wanted.prefill_step_size:,}, estimated",
        "arena": f"{plan.slots} of {sizes.config.num_experts} per layer, {each} each",
    }


def _verdict(plan: MemoryPlan) -> str:
    if plan.shortfall_bytes:
        why = "" if plan.sizes.streamed else ": experts of this type do not stream, so all have to be in memory"
        return f"It does not fit: {plan.shortfall_bytes / 1e9:.2f} GB are missing{why}."
    capped = "The ceiling is lower than was asked for, so that the system keeps what it needs. "
    all_in = plan.slots == plan.sizes.config.num_experts
    return (capped if plan.is_capped else "") + ("It fits, with all experts in memory." if all_in else "It fits.")


def _commands(plan: MemoryPlan) -> Iterator[str]:
    if plan.wired_limit_mb:
        yield from _wrapped("It takes more for the GPU than Metal advises. Until the next restart, this allows it:")
        yield f"  sudo sysctl iogpu.wired_limit_mb={plan.wired_limit_mb}"


def _advice(plan: MemoryPlan) -> Iterator[str]:
    """What would help, each on its own."""
    found = remedies(plan)
    yield "What would help, each on its own:"
    if found.slots:
        yield f"  --expert-slots {found.slots}"
    if found.context:
        yield f"  --context {found.context}"
    if found.step:
        yield f"  --prefill-step-size {found.step}"
    if found.memory_bytes:
        beyond = plan.machine.working_set_bytes and plan.gpu_bytes > plan.machine.working_set_bytes
        how = ", with the wired limit raised (the plan says how)" if beyond else ""
        yield f"  --memory {-(-found.memory_bytes // 10**7) / 100:.2f}GB{how}"
    dense = plan.dense_bytes - plan.shortfall_bytes
    if dense > 0:
        text = f"a quantisation with dense weights of {dense / 1e9:.2f} GB instead of {plan.dense_bytes / 1e9:.2f} GB"
        yield from _wrapped(f"  {text}", 2)
    if not plan.sizes.streamed:
        yield "  a pack or GGUF file of the model, whose experts stream (mlx-moe convert)"
    yield f"  a machine with {-(-found.machine_bytes // (1 << 30))} GiB of memory"


def _estimate(plan: MemoryPlan, expected: Expectation, speeds: Speeds) -> Iterator[str]:
    yield from _wrapped(
        "Estimate: bytes moved and waits alone, by arithmetic. Nothing below was measured on this machine, and what"
        f" kernels cost beyond their bytes is not in it. Taken: SSD {speeds.ssd_bytes_s / 1e9:g} GB/s, memory"
        f" {speeds.memory_bytes_s / 1e9:g} GB/s, {speeds.wait_s * 1e6:g} µs per wait; one token at a time, true"
        " routing, no drafts; hit rates of LRU in a run on Qwen3.8-Flash-Next."
    )
    yield ""
    yield f"{'hit rate':<21}{100 * expected.hit_rate:>9.1f} %   {_hit_note(plan)}"
    read = f"{size(expected.read_bytes)} expected"
    yield f"{'reads per token':<21}{size(expected.cold_bytes):>12}  with nothing in memory; {read}"
    yield ""
    yield from _terms(plan, expected)
    yield ""
    yield from _prompts(expected)


def _terms(plan: MemoryPlan, expected: Expectation) -> Iterator[str]:
    """A token's time by cause, and what that makes in tokens per second."""
    sizes = plan.sizes
    waits = f"{sizes.config.num_hidden_layers}, one per layer" if expected.waits_s else "none when nothing misses"
    rows = (
        ("dense weights", expected.dense_s, f"{size(sizes.dense_token_bytes)} from memory"),
        ("experts", expected.experts_s, f"{size(sizes.token_expert_bytes)} from memory"),
        ("states and keys", expected.states_s, "memory, at the end of the context"),
        ("waits", expected.waits_s, waits),
        ("misses", expected.misses_s, f"{size(expected.read_bytes)} from the SSD"),
        ("one after the other", expected.token_s, f"{1 / expected.token_s:.1f} tokens/s"),
        ("SSD beside the rest", expected.overlapped_s, f"{1 / expected.overlapped_s:.1f} tokens/s at most"),
    )
    for name, seconds, note in rows:
        yield f"{name:<21}{1e3 * seconds:>9.2f} ms  {note}"


def _hit_note(plan: MemoryPlan) -> str:
    if plan.slots == plan.sizes.config.num_experts:
        return "all experts are in memory"
    return "from LRU's curve, one run of 300 tokens"


def _prompts(expected: Expectation) -> Iterator[str]:
    if not expected.prefill[0].read_bytes:
        yield "Prompts read no experts from the SSD."
        return
    yield from _wrapped("Prompts read every expert once per piece. Reads of 10,000 tokens, computing on top:")
    for piece in expected.prefill:
        yield f"pieces of {piece.step:<11,}{piece.read_s:>9.1f} s   {size(piece.read_bytes)} in {piece.pieces} pieces"


def _wrapped(text: str, indent: int = 0) -> list[str]:
    return textwrap.wrap(text, WIDTH, subsequent_indent=" " * indent, break_on_hyphens=False)
