"""Replay recorded routing through other settings of paging: hits, bytes, tokens per second, what substitution costs.

usage: python scripts/replay_routing.py TRACE [--slots 8 10 20] [--bonus 0.4 0.85 3] [--machine m5-air-24 --model M]
       python scripts/replay_routing.py --synthetic --slots 86 158 --machine m5-air-24
       python scripts/replay_routing.py --predict --machine m5-air-24

TRACE is written by ``mlx-moe generate --record-routing TRACE`` (or ``perplexity``, or ``load(record_routing=…)``).
``--synthetic`` takes routing made up after published figures of Qwen3.8-Flash-Next instead; ``--predict`` prints the
whole prediction for that model as a Markdown table. Nothing is computed by a model and nothing is read from a disk.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from mlx_moe.machines import MACHINES
from mlx_moe.paging.device import WAIT_US, PassTime, Speeds, pass_time
from mlx_moe.paging.drafts import draft_windows
from mlx_moe.paging.moce import MoceConfig
from mlx_moe.paging.replay import POLICIES, ReplayResult, ReplaySettings, learned_start, recorded_settings, replay
from mlx_moe.paging.replay_bound import bound
from mlx_moe.paging.sizes import state_bytes
from mlx_moe.paging.synthetic import synthetic_trace
from mlx_moe.paging.trace import Trace, read_trace
from mlx_moe.prediction import SIMULATED_LAYERS, prediction_table, predictions, terms
from mlx_moe.published import DENSE_BITS, LAYERS, mean_record_bytes, published_sizes

LEARNED, BOUND, POOLED_BOUND, MOCE = "learned fill", "belady", "belady-global", "moce"
RULES = (*POLICIES, LEARNED, BOUND, POOLED_BOUND, MOCE)
ERROR = (
    "rMSE: relative squared error of routed outputs from mixing weights alone, outputs taken as orthogonal and equal"
)
_HEAD = f"{'rule':<28}{'slots':>6}{'hits':>8}{'misses/tok':>11}{'kB/tok':>10}{'subst':>8}{'rMSE':>8}{'tok/pass':>9}"


def main(argv: Sequence[str] | None = None) -> int:
    """Parse, replay, print; returns the exit status. Errors of use are one line."""
    args = _parse(argv)
    try:
        if args.predict:
            return _predict(args)
        trace = _trace(args)
        rows = list(_rows(args, trace))
        _print(args, trace, rows)
        if args.json:
            _write_json(args.json, rows)
        if args.plot:
            from replay_plot import plot

            plot(args.plot, rows)
    except (ValueError, OSError) as error:
        print(f"replay_routing: error: {error}", file=sys.stderr)
        return 1
    return 0


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    out = argparse.ArgumentParser(description="Replay recorded routing.", allow_abbrev=False)
    out.add_argument("trace", nargs="?", metavar="TRACE", help="recording")
    out.add_argument("--synthetic", action="store_true", help="routing made up after the published model's figures")
    out.add_argument("--predict", action="store_true", help="the published model on --machine, every term")
    out.add_argument("--slots", type=int, nargs="+", metavar="N", help="experts per layer (default: as recorded)")
    out.add_argument("--rule", nargs="+", choices=RULES, metavar="RULE", help=f"of {', '.join(RULES)} (default: all)")
    out.add_argument("--bonus", type=float, nargs="+", default=[0.4, 0.85, 1.5, 3.0], metavar="X", help="of moce")
    out.add_argument("--keep-top", type=int, nargs="+", default=[3], metavar="N", help="of moce (default: 3)")
    out.add_argument("--max-rank", nargs="+", default=["24"], metavar="N", help="of moce, or 'none' (default: 24)")
    out.add_argument("--no-read-ahead", action="store_false", dest="read_ahead", help="read what is needed only")
    out.add_argument("--learn", metavar="TRACE", help="another recording, whose most used experts are the first fill")
    out.add_argument("--half-life", type=int, default=128, metavar="N", help="tokens, of lfu-decay (default: 128)")
    out.add_argument("--hold", type=int, default=256, metavar="N", help="tokens, of lru+hold (default: 256)")
    out.add_argument("--drafts", type=float, nargs="+", metavar="A", help="acceptance by position: tokens in windows")
    out.add_argument("--seed", type=int, default=0, help="of drafts and of made-up routing (default: 0)")
    out.add_argument("--machine", choices=MACHINES, help="whose speeds price a token")
    out.add_argument("--wait-us", type=float, default=WAIT_US, metavar="X", help=f"a wait, µs (default: {WAIT_US:g})")
    out.add_argument("--model", help="whose dense weights and states a token reads")
    out.add_argument("--dense-gb", type=float, metavar="X", help="dense weights that a token reads, instead of --model")
    out.add_argument("--json", metavar="FILE", help="write all figures there")
    out.add_argument("--plot", metavar="FILE", help="a PNG of bytes per token against substituted share and rMSE")
    args = out.parse_args(argv)
    if (args.trace is not None) + args.synthetic + args.predict != 1:
        out.error("needed: one of TRACE, --synthetic and --predict")
    return args


def _trace(args: argparse.Namespace) -> Trace:
    if args.synthetic:
        trace = synthetic_trace(SIMULATED_LAYERS, (mean_record_bytes(),) * SIMULATED_LAYERS, seed=args.seed)
    else:
        trace = read_trace(args.trace)
    if not trace.passes:
        raise ValueError(f"{args.trace}: no whole pass was recorded")
    return trace if args.drafts is None else draft_windows(trace, args.drafts, args.seed)


def _rows(args: argparse.Namespace, trace: Trace) -> Iterator[dict[str, Any]]:
    """A setting each: name, slots, result, time of a pass if it can be told, layers of the model to one replayed."""
    rules = args.rule or [rule for rule in RULES if rule != LEARNED or args.learn]
    learned = read_trace(args.learn) if args.learn else None
    if LEARNED in rules and learned is None:
        raise ValueError("learned fill needs --learn TRACE, another recording of the same model")
    if learned is not None and learned.header.fingerprint != trace.header.fingerprint:
        raise ValueError(f"{args.learn}: a recording of another model; needed: one with the same routers")
    price, layers = _price(args, trace), LAYERS / len(trace.header.experts) if args.synthetic else 1
    for slots in args.slots or [recorded_settings(trace).slots]:
        plain = ReplaySettings(slots, read_ahead=args.read_ahead, half_life=args.half_life, hold=args.hold)
        for rule in rules:
            for name, result in _replays(args, trace, learned, rule, plain):
                time = price(result) if price is not None and result.windows.passes else None
                yield {"rule": name, "slots": slots, "result": result, "time": time, "layers": layers}


def _replays(
    args: argparse.Namespace, trace: Trace, learned: Trace | None, rule: str, plain: ReplaySettings
) -> Iterator[tuple[str, ReplayResult]]:
    if rule in POLICIES:
        yield rule, replay(trace, replace(plain, policy=rule))
    elif rule == LEARNED:
        yield rule, replay(trace, plain, learned_start(learned, plain.slots))
    elif rule in (BOUND, POOLED_BOUND):
        yield rule, bound(trace, plain.slots, pooled=rule == POOLED_BOUND)
    else:
        for moce in _settings(args):
            cap = "none" if moce.max_rank is None else moce.max_rank
            yield f"moce {moce.bonus:g} / {moce.keep_top} / {cap}", replay(trace, replace(plain, moce=moce))


def _settings(args: argparse.Namespace) -> Iterator[MoceConfig]:
    for cap in args.max_rank:
        if cap != "none" and not cap.isdecimal():
            raise ValueError(f"--max-rank {cap}; needed: a whole number or 'none'")
        for keep in args.keep_top:
            for bonus in args.bonus:
                yield MoceConfig(bonus, keep, None if cap == "none" else int(cap))


def _price(args: argparse.Namespace, trace: Trace) -> Any:
    """From a result to the time of a pass; None where machine or model were not named."""
    if args.machine is None:
        return None
    speeds: Speeds = MACHINES[args.machine].speeds(args.wait_us)
    dense_bytes, carried, layers = _model(args, trace)
    return lambda result: pass_time(result.windows.work(dense_bytes, carried, layers), speeds)


def _model(args: argparse.Namespace, trace: Trace) -> tuple[float, float, float]:
    """Dense bytes of a token, bytes of states that it reads and writes, layers of the model to one recorded."""
    if args.dense_gb is not None:
        return args.dense_gb * 1e9, 0, 1
    if args.synthetic:
        sizes, layers = published_sizes(DENSE_BITS["6-bit"]), LAYERS / len(trace.header.experts)
    elif args.model:
        from mlx_moe.formats.hub import Request
        from mlx_moe.model_sizes import model_sizes

        sizes, layers = model_sizes(Request(args.model))[1], 1
    else:
        raise ValueError("--machine needs --model M or --dense-gb X, for the bytes that every token reads")
    return sizes.dense_token_bytes, 2 * state_bytes(sizes.config, 2), layers


def _print(args: argparse.Namespace, trace: Trace, rows: Sequence[dict[str, Any]]) -> None:
    header, passes = trace.header, trace.passes
    tokens = sum(event.batch * event.accepted for event in passes)
    print(f"{len(passes)} passes, {tokens} tokens, {header.trunk} layers, top {header.top_k} of {max(header.experts)}")
    if trace.cut:
        print("The recording ends early; passes after its last whole one are missing.")
    if trace.interrupted:
        print(f"{trace.interrupted} passes were interrupted; what they counted in the engine is not in it.")
    if any(row["result"].limited for row in rows):
        print(f"Only the best {header.kept} ranks were recorded; no expert beyond them is promoted here.")
    print(_HEAD)
    for row in rows:
        print(_line(row))
    if any(row["result"].norm for row in rows):
        print(ERROR)
    timed = [row for row in rows if row["time"] is not None]
    if timed:
        print(f"\n{MACHINES[args.machine].title}, {args.wait_us:g} µs per wait: ms of a pass by cause, tokens/s")
        names = [name for name in terms(timed[0]["time"]) if name.endswith("_s") and name != "tokens_s"]
        print(
            f"{'rule':<28}{'slots':>6}" + "".join(f"{name[:-2]:>9}" for name in names) + f"{'serial':>9}{'overlap':>9}"
        )
        for row in timed:
            print(_times(row, row["time"], names))


def _line(row: dict[str, Any]) -> str:
    result: ReplayResult = row["result"]
    windows = result.windows
    tokens = max(1, windows.tokens)
    uses = windows.hits + windows.misses
    hits = f"{windows.hits / uses:>8.1%}" if uses else f"{'-':>8}"
    read = row["layers"] * windows.read_bytes
    misses = row["layers"] * windows.misses / tokens
    out = f"{row['rule']:<28}{row['slots']:>6}{hits}{misses:>11.1f}{read / tokens / 1e3:>10.1f}"
    out += f"{result.substituted_share:>8.1%}{result.relative_error:>8.3f}"
    return out + f"{windows.tokens / max(1, windows.passes):>9.2f}"


def _times(row: dict[str, Any], time: PassTime, names: Sequence[str]) -> str:
    found = terms(time)
    serial, overlapped = time.tokens_s
    return (
        f"{row['rule']:<28}{row['slots']:>6}"
        + "".join(f"{1e3 * found[name]:>9.2f}" for name in names)
        + f"{serial:>9.2f}{overlapped:>9.2f}"
    )


def as_dict(row: dict[str, Any]) -> dict[str, Any]:
    """Plain numbers of a row, for JSON and plots; bytes and seconds."""
    result: ReplayResult = row["result"]
    windows = result.windows
    read = row["layers"] * windows.read_bytes
    uses = windows.hits + windows.misses
    out = {"rule": row["rule"], "slots": row["slots"], "bytes_read": result.bytes_read, "limited": result.limited}
    out |= {"layers": [asdict(counters) for counters in result.counters], "tokens": windows.tokens}
    out |= {"passes": windows.passes, "window_hit_rate": windows.hits / uses if uses else None}
    out |= {"hit_rate": result.hit_rate, "window_bytes_per_token": read / max(1, windows.tokens)}
    out |= {"substituted": result.substituted_share, "relative_error": result.relative_error}
    return out | ({} if row["time"] is None else {"time": terms(row["time"])})


def _write_json(file: str, rows: Sequence[dict[str, Any]]) -> None:
    _replace(file, json.dumps([as_dict(row) for row in rows], indent=2) + "\n")


def _replace(file: str, text: str) -> None:
    """Whole or not at all."""
    path = Path(file)
    part = path.with_name(path.name + ".part")
    try:
        with open(part, "w", encoding="utf-8") as out:
            out.write(text)
            out.flush()
            os.fsync(out.fileno())
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def _predict(args: argparse.Namespace) -> int:
    """The whole table, as Markdown."""
    machine = MACHINES[args.machine or "m5-air-24"]
    drafts = {} if args.drafts is None else {"acceptance": args.drafts}
    found = list(predictions(machine, args.read_ahead, seed=args.seed, **drafts))
    print("\n".join(prediction_table(machine, found)))
    if args.json:
        _replace(args.json, json.dumps([row.as_dict() for row in found], indent=2) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
