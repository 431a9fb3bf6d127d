"""``mlx-moe convert``: a pack from a Hugging Face folder or a GGUF file, and ``--verify``."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from mlx_moe.cli import options
from mlx_moe.cli.info import size

if TYPE_CHECKING:
    from mlx_moe.conversion.choices import Choices

EXPERTS = "keep, iq2_xxs, iq2_xs, iq2_s, iq3_xxs, q2_0, iq4_nl, q8_0 or bf16"
_UNITS = {"MB": 10**6, "GB": 10**9, "MIB": 1 << 20, "GIB": 1 << 30}


def main(argv: Sequence[str] | None = None) -> int:
    """Parse, plan, write, verify; returns the exit status."""
    args = _parse(argv)
    if args.model is None and not args.verify:
        raise ValueError("--model is missing: a Hugging Face folder, a GGUF file or its folder")
    if args.model is not None:
        _convert(args)
    if args.verify:
        _verify(args.out)
    return 0


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    out = options.plain_parser("convert", "Make a pack: experts as records that stream from disk.")
    out.add_argument("--model", help="Hugging Face folder (BF16, F16, F32 or FP8), GGUF file or its folder")
    out.add_argument("--out", required=True, help="a new folder; after a stop, the same call goes on")
    out.add_argument("--experts", help=f"type of gate and up: {EXPERTS} (default: keep for GGUF, else iq2_xs)")
    out.add_argument("--down", help="type of down, likewise (default: keep for GGUF, else q2_0 or iq4_nl, which fits)")
    out.add_argument("--dense", help="keep, 8, 6, 4 (bits of mx.quantize) or bf16 (default: keep for GGUF, else 8)")
    out.add_argument("--ngram", help="n-gram table: keep, iq4_nl, q8_0 or bf16 (default: a GGUF's stays, else iq4_nl)")
    out.add_argument("--copy-table", action="store_true", help="copy a GGUF's n-gram table, do not leave it there")
    out.add_argument("--imatrix", metavar="FILE", help="importances by which errors are weighed, .safetensors")
    out.add_argument("--memory", type=_bytes, default=8 * 10**9, help="what this process may use (default: 8GB)")
    out.add_argument("--norm-convention", choices=("auto", "raw", "folded"), default="auto", help="(default: auto)")
    out.add_argument("--verify", action="store_true", help="read the pack again and compare every checksum")
    return out.parse_args(argv)


def _bytes(text: str) -> int:
    match = re.fullmatch(r"(\d{1,6}(?:\.\d{1,3})?)\s*([MG]i?B)", text.strip(), re.IGNORECASE)
    if not match:
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is not a size such as 2GB or 1500MB")
    return int(float(match[1]) * _UNITS[match[2].upper()])


def _choices(args: argparse.Namespace) -> Choices:
    from mlx_moe.conversion.choices import Choices

    return Choices(
        experts=args.experts,
        down=args.down,
        dense=args.dense,
        ngram=args.ngram,
        copy_table=args.copy_table,
        memory_bytes=args.memory,
        norm_convention=args.norm_convention,
    )


def _convert(args: argparse.Namespace) -> None:
    from mlx_moe.conversion.imatrix import read_importances
    from mlx_moe.conversion.plan import make_plan
    from mlx_moe.conversion.run import run_plan
    from mlx_moe.conversion.source import open_source

    choices = _choices(args)
    source = open_source(args.model, choices.norm_convention)
    layers = tuple(layer.name for layer in source.layers)
    importances = read_importances(args.imatrix, layers, source.config) if args.imatrix else None
    plan = make_plan(source, choices, importances)
    with _bar(sum(file.data_bytes for file in plan.files), "convert") as advance:
        run_plan(plan, args.out, advance)
    print(f"Wrote {size(plan.total_bytes)}: {args.out}")


def _verify(folder: str) -> None:
    from mlx_moe.formats.pack import open_pack, verify_pack

    pack = open_pack(folder)
    total = sum(info.stop - info.start for file in pack.files for info in file.tensors.values())
    with _bar(total, "verify") as advance:
        count = verify_pack(pack, advance)
    print(f"Verified {count} tensors, {size(total)}: {folder}")


@contextmanager
def _bar(total: int, what: str) -> Iterator[Callable[..., None]]:
    """Bytes done, rate and time left, on a terminal."""
    from tqdm import tqdm

    with tqdm(total=total, desc=what, unit="B", unit_scale=True, file=sys.stderr, disable=None) as bar:

        def advance(count: int, name: str = "") -> None:
            if name:
                bar.set_postfix_str(name.split(".")[0], refresh=False)
            bar.update(count)

        yield advance
