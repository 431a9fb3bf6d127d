"""``mlx-moe perplexity``: loss on text as decoding runs, for the exact router and for cache-aware ones."""

from __future__ import annotations

import argparse
import gc
import itertools
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlx_moe.cli import options

if TYPE_CHECKING:
    from mlx_lm.tokenizer_utils import TokenizerWrapper

    from mlx_moe.models.qwen4_exp import Model
    from mlx_moe.paging.moce import MoceConfig
    from mlx_moe.quality import Passage, Score

_NAMES = {"bonus": "bonus", "cap": "max_rank"}
_HEAD = f"{'bonus':>6}{'keep':>5}{'cap':>5}{'perplexity':>12}{'ratio':>8}  {'95 %':^16}{'bits/byte':>10}"
_HEAD_PAGING = f"{'hits':>7}{'misses':>8}{'kB/token':>10}{'agree':>7}{'KL':>7}"


def main(argv: Sequence[str] | None = None) -> int:
    """Parse, score the same tokens with every setting, print; returns the exit status."""
    args = _parse(argv)
    if args.json:
        options.check_folder("--json", args.json)
    if args.record_routing:
        options.check_folder("--record-routing", args.record_routing)
    for path in args.text:
        if not path.is_file():
            raise FileNotFoundError(f"{path}: no such file")
    settings = _settings(args)
    print(_HEAD + _HEAD_PAGING, flush=True)
    if args.at_once:
        _at_once(args, settings)
    else:
        _one_by_one(args, settings)
    return 0


def _one_by_one(args: argparse.Namespace, settings: Sequence[MoceConfig | None]) -> None:
    """Load once per setting, so that every setting starts with the same experts in memory."""
    exact, rows = None, []
    for setting in settings:
        score = _score(args, setting, settings)
        gc.collect()  # or two models would be in memory
        exact = exact or score
        rows.append(_row(setting, score, exact, args.seed))
        print(_line(rows[-1]), flush=True)
        if args.json:
            _write(args, rows)


def _at_once(args: argparse.Namespace, settings: Sequence[MoceConfig | None]) -> None:
    """Load once, all experts in memory; the settings are the rows of a batch, and their memory is simulated."""
    from mlx_moe.cli import session
    from mlx_moe.quality import score_at_once

    model, tokenizer, _ = session.open_model(args, moce=None, expert_slots=None, resident=True)
    _check(model, settings)
    texts = _texts(args, tokenizer)

    def interim(scores: Sequence[Score]) -> list[dict[str, Any]]:
        rows = [_row(setting, score, scores[0], args.seed) for setting, score in zip(settings, scores, strict=True)]
        if args.json:
            _write(args, rows, at_once=True, read_ahead=False, eviction="lru", tokens_asked=args.tokens)
        return rows

    with model:
        rows = interim(score_at_once(model, texts, settings, args.expert_slots, _say(args.tokens), interim))
    print(*map(_line, rows), "all at once: read-ahead off, LRU, memory simulated", sep="\n", flush=True)


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    out = options.parser("perplexity", "Measure loss on text one token at a time, as decoding runs.", prompts=False)
    out.add_argument("--text", type=Path, nargs="+", required=True, help="UTF-8 files; NUL bytes part documents")
    out.add_argument(
        "--one-token",
        action="store_true",
        required=True,
        help="one token at a time, the only way: a wide batch hides what cache-aware routing costs",
    )
    out.add_argument("--tokens", type=int, default=1024, metavar="N", help="to score, of all files (default: 1024)")
    out.add_argument(
        "--table",
        nargs="+",
        metavar="NAME=A,B",
        help="every pair of bonus=0.2,0.85 and cap=none,8,16 (--moce-max-rank); replaces those two settings",
    )
    out.add_argument(
        "--at-once",
        action="store_true",
        help="all settings as one batch: experts all in memory, the N of --expert-slots simulated, read-ahead off",
    )
    out.add_argument("--seed", type=int, default=0, help="of the bootstrap's random numbers (default: 0)")
    out.add_argument("--json", metavar="FILE", help="write settings and figures there")
    options.add_recording(out)  # of the exact router
    args = out.parse_args(argv)
    if args.at_once and args.expert_slots is None:
        out.error("--at-once needs --expert-slots N, the experts per layer that its simulated memory holds")
    if args.at_once and args.record_routing is not None:
        out.error("--at-once cannot record routing; leave one of --at-once and --record-routing out")
    return args


def _settings(args: argparse.Namespace) -> list[MoceConfig | None]:
    """The exact router, always and first, then what was asked for. Raises ValueError, naming the option."""
    from mlx_moe.routing_settings import moce_settings
    from mlx_moe.runtime import model_folder

    asked = options.moce(args, measure=True)
    if args.table is None and asked is None:
        return [None]
    base = moce_settings(model_folder(args.model), asked or {"measure": True})
    if args.table is None:
        return [None, base]
    grid: dict[str, list[Any]] = {}
    for part in args.table:
        name, _, values = part.partition("=")
        if name not in _NAMES or not values:
            raise ValueError(f"--table {part}: needed: bonus=0.2,0.85 or cap=none,8,16")
        if getattr(args, f"moce_{_NAMES[name]}") is not None:
            raise ValueError(f"--moce-{_NAMES[name].replace('_', '-')} and --table {name}=… were both given")
        grid[_NAMES[name]] = [_value(part, name, value) for value in values.split(",")]
    found = (replace(base, **dict(zip(grid, cell, strict=True))) for cell in itertools.product(*grid.values()))
    return [None, *dict.fromkeys(setting for setting in found if setting.bonus)]  # without a bonus: the exact router


def _value(part: str, name: str, text: str) -> float | int | None:
    if name == "cap" and text == options.EVERY:
        return None
    try:
        return float(text) if name == "bonus" else int(text)
    except ValueError:
        raise ValueError(f"--table {part}: {text!r} is not a number") from None


def _score(args: argparse.Namespace, setting: MoceConfig | None, settings: Sequence[MoceConfig | None]) -> Score:
    """Of a model just loaded. settings: all that will follow, checked before the first takes its minutes."""
    from mlx_moe.cli import session
    from mlx_moe.quality import score

    recording = args.record_routing if setting is None else None  # of the exact router
    # What one setting learned must not be what the next starts with.
    model, tokenizer, _ = session.open_model(args, moce=setting, usage=False, record_routing=recording)
    _check(model, settings)
    texts = _texts(args, tokenizer)
    with model:
        return score(model, texts, _say(args.tokens))


def _texts(args: argparse.Namespace, tokenizer: TokenizerWrapper) -> list[Passage]:
    from mlx_moe.quality import passages

    def encode(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False)

    return passages(args.text, encode, tokenizer.decode, tokenizer.eos_token_id, args.tokens)


def _check(model: Model, settings: Sequence[MoceConfig | None]) -> None:
    for setting in filter(None, settings):
        if model.experts_stats is None:
            raise ValueError("cache-aware routing cannot be used with a model folder, whose experts are all in memory")
        setting.check(model.config.num_experts_per_tok)


def _say(total: int) -> Callable[[int], None]:
    def say(done: int) -> None:
        if sys.stderr.isatty() and (done % 16 == 0 or done == total):
            print(f"{done} of {total} tokens", end="\r", file=sys.stderr, flush=True)

    return say


def _row(setting: MoceConfig | None, score: Score, exact: Score, seed: int) -> dict[str, Any]:
    from mlx_moe.quality import against

    moce = None if setting is None else {k: v for k, v in asdict(setting).items() if k != "measure"}
    return {"moce": moce} | score.as_dict() | ({} if score is exact else against(exact, score, seed))


def _line(row: dict[str, Any]) -> str:
    moce = row["moce"]
    if moce is None:
        out = f"{'exact':>6}{'':10}"
    else:
        cap = options.EVERY if moce["max_rank"] is None else moce["max_rank"]
        out = f"{moce['bonus']:>6g}{moce['keep_top']:>5}{cap:>5}"
    out += f"{row['perplexity']:>12.4f}"
    low, high = row.get("perplexity_ratio_95", (1, 1))
    out += f"{'':26}" if moce is None else f"{row['perplexity_ratio']:>8.4f}  {f'{low:.4f}-{high:.4f}':^16}"
    out += f"{row['bits_per_byte']:>10.4f}"
    if row.get("hit_rate") is None:
        return out
    out += f"{row['hit_rate']:>7.1%}{row['misses_per_token']:>8.1f}{row['bytes_per_token'] / 1e3:>10.1f}"
    return out + f"{row['agreement']:>7.1%}{row['kl_per_token']:>7.3f}"


def _write(args: argparse.Namespace, rows: list[dict[str, Any]], **changes: Any) -> None:
    """changes: what else is said of the run."""
    import mlx.core as mx

    from mlx_moe.formats.checkpoint import write_json

    settings = {"model": args.model, "text": [path.name for path in args.text], "seed": args.seed} | changes
    write_json(Path(args.json), settings | {"device": str(mx.default_device()), "mlx": mx.__version__, "rows": rows})
