"""``mlx-moe plan``: how a model would use a machine's memory and what to expect of it, before anything is fetched."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from mlx_moe.cli import options
from mlx_moe.cli.plan_report import report
from mlx_moe.machines import MACHINES, UNKNOWN
from mlx_moe.paging.device import WAIT_US, Speeds
from mlx_moe.paging.estimate import Expectation, expect
from mlx_moe.paging.plan import Machine, MemoryPlan, Wanted, default_context, parse_bytes, plan_memory, remedies

_ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


def main(argv: Sequence[str] | None = None) -> int:
    """Parse, look, plan, print; the exit status is 1 where the model does not fit."""
    args = _parse(argv)
    if args.json not in (None, "-"):
        options.check_folder("--json", args.json)
    from mlx_moe.formats.hub import Request
    from mlx_moe.model_sizes import model_sizes

    item_bytes = _ITEM_BYTES[args.dtype]
    request = Request(args.model or _demonstration(), tuple(args.include), args.revision)
    found, sizes = model_sizes(request, item_bytes, None if args.mtp == "none" else args.mtp)
    context = args.context or default_context(found.config)
    wanted = Wanted(
        args.memory, args.expert_slots, context, args.snapshots, args.prefill_step_size, item_bytes=item_bytes
    )
    preset = MACHINES[args.machine] if args.machine else UNKNOWN
    ssd, memory = args.ssd_gb_s or preset.ssd_gb_s, args.memory_gb_s or preset.memory_gb_s
    speeds = Speeds(ssd * 1e9, memory * 1e9, args.wait_us / 1e6)
    plan = plan_memory(sizes, _machine(args), wanted)
    expected = expect(plan, speeds)
    if args.json != "-":
        print("\n".join(report(args, found, plan, expected, speeds)))
    if args.json:
        _write_json(args.json, request.repo, plan, expected, speeds)
    return int(plan.shortfall_bytes > 0)


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    out = options.plain_parser("plan", "Say what would be in memory, and what to expect, before anything is fetched.")
    out.add_argument("--model", help="pack, folder, GGUF file or Hub repository (default: the demonstration model)")
    out.add_argument("--include", nargs="+", action="extend", default=[], metavar="PATTERN", help="as for download")
    out.add_argument("--revision", help="of the Hub repository")
    out.add_argument("--mtp", default="auto", metavar="FILE", help="draft layer: auto, none or a GGUF file")
    out.add_argument("--dtype", choices=options.DTYPES, default="bfloat16", help="to compute in (default: bfloat16)")
    out.add_argument("--memory", type=_size, metavar="SIZE", help="ceiling of the process (default: as Metal advises)")
    out.add_argument("--expert-slots", type=_whole, metavar="N", help="experts per layer (default: as many as fit)")
    context = f"tokens (default: {Wanted.context}, or the model's most)"
    out.add_argument("--context", type=_whole, metavar="N", help=context)
    out.add_argument("--snapshots", type=int, default=1, metavar="N", help="of states, to go on from (default: 1)")
    out.add_argument("--prefill-step-size", type=_whole, default=2048, metavar="N", help="(default: 2048)")
    out.add_argument("--machine", choices=MACHINES, help="memory and speeds of a machine by name")
    out.add_argument("--simulate-ram", type=_size, metavar="SIZE", help="all memory; a Mac's 24 GB are 24GiB")
    out.add_argument(
        "--ssd-gb-s", type=_positive, metavar="X", help=f"SSD, GB/s (default: of --machine, else {UNKNOWN.ssd_gb_s:g})"
    )
    out.add_argument(
        "--memory-gb-s", type=_positive, metavar="X", help=f"memory, GB/s (default: likewise, {UNKNOWN.memory_gb_s:g})"
    )
    out.add_argument(
        "--wait-us", type=_not_negative, default=WAIT_US, metavar="X", help=f"a wait, µs (default: {WAIT_US:g})"
    )
    out.add_argument("--json", metavar="FILE", help="write the plan there, '-' for standard output instead of text")
    return out.parse_args(argv)


def _size(text: str) -> int:
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _whole(text: str) -> int:
    if not text.isdecimal() or not 0 < int(text[:12]) < 10**9:
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is not a whole number above 0")
    return int(text)


def _not_negative(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < 1e9:
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is not a number of 0 or more")
    return value


def _positive(text: str) -> float:
    if not (value := _not_negative(text)):
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is not a number above 0")
    return value


def _demonstration() -> str:
    from mlx_moe.runtime import model_folder

    return str(model_folder(None))


def _machine(args: argparse.Namespace) -> Machine:
    if args.simulate_ram or args.machine:
        return Machine.simulated(args.simulate_ram or MACHINES[args.machine].memory_bytes)
    from mlx_moe.platform import device

    here = device()
    return Machine(here.memory_bytes, here.working_set_bytes)


def _write_json(file: str, model: str, plan: MemoryPlan, expected: Expectation, speeds: Speeds) -> None:
    """Sizes in bytes, times in seconds."""
    value = {
        "model": model,
        "machine": {
            "memory_bytes": plan.machine.memory_bytes,
            "working_set_bytes": plan.machine.working_set_bytes,
        },
        "wanted": asdict(plan.wanted),
        "ceiling_bytes": plan.ceiling_bytes,
        "parts": plan.parts,
        "total_bytes": plan.total_bytes,
        "gpu_bytes": plan.gpu_bytes,
        "system_bytes": plan.system_bytes,
        "shortfall_bytes": plan.shortfall_bytes,
        "slots": plan.slots,
        "record_bytes": list(plan.sizes.records),
        "wired_limit_mb": plan.wired_limit_mb,
        "remedies": asdict(remedies(plan)) if plan.shortfall_bytes else None,
        "speeds": asdict(speeds),
        "estimate": {**asdict(expected), "token_s": expected.token_s, "overlapped_s": expected.overlapped_s},
    }
    text = json.dumps(value, indent=2)
    if file == "-":
        print(text)
    else:
        Path(file).write_text(text + "\n", encoding="utf-8")
