"""``mlx-moe download``: one model of a Hub repository into the Hub's cache, or into a folder."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from mlx_moe.cli import options

if TYPE_CHECKING:
    from mlx_moe.formats.hub import Plan
    from mlx_moe.formats.hub_plan import RepoFile, Variant

WIDTH = 80
"""Of what is printed, in columns."""
_ROWS = 12  # of files; more are counted


def main(argv: Sequence[str] | None = None) -> int:
    """Parse, plan, print, fetch; returns the exit status."""
    out = options.plain_parser("download", "Fetch a model from the Hub: what the loader needs of it, and nothing else.")
    out.add_argument("repo", metavar="REPO", help="org/name on the Hub")
    out.add_argument(
        "--include",
        nargs="+",
        action="extend",
        default=[],
        metavar="PATTERN",
        help="which model of a repository with several, as '*UD-Q2_K_XL*'; all of its files are fetched",
    )
    out.add_argument("--revision", help="branch, tag or commit (default: main)")
    out.add_argument("--local-only", action="store_true", help="check what is on this machine; fetch nothing")
    out.add_argument("--dir", metavar="DIR", help="a folder to fetch into (default: the Hub's cache)")
    args = out.parse_args(argv)
    from mlx_moe.config import ModelConfig
    from mlx_moe.formats.hub import AmbiguousError, Request, download, local_copy

    folder = Path(args.dir).expanduser() if args.dir else None
    request = Request(args.repo, tuple(args.include), args.revision, folder)
    try:
        found = local_copy(request) if args.local_only else download(request, ModelConfig.from_path, _show)
    except AmbiguousError as error:
        print("\n".join(_choices(error.variants)))
        raise
    print(f"Ready: {found}")
    return 0


def _show(plan: Plan) -> None:
    from mlx_moe.formats.hub_cache import cache_root
    from mlx_moe.formats.hub_plan import human

    request, total = plan.request, sum(file.size for file in plan.files)
    rows = list(_rows(plan.files))
    lines = [f"{request.repo} at {request.revision or 'main'} ({plan.commit[:8]})", *rows[:_ROWS]]
    if len(rows) > _ROWS:
        lines.append(f"{'':>12}  and {len(rows) - _ROWS} more")
    lines += [
        f"{human(total):>12}  in {len(plan.files)} files",
        f"{human(plan.needed_bytes):>12}  to fetch",
        f"{human(plan.free_bytes):>12}  free in {request.folder or cache_root()}",
    ]
    print("\n".join(_clipped(line) for line in lines), flush=True)


def _rows(files: Iterable[RepoFile]) -> Iterable[str]:
    """A line per file, the largest first; the shards of one model are one line."""
    from mlx_moe.formats.hub_plan import by_numbering, human

    sizes = {name: (sum(file.size for file in family), len(family)) for name, family in by_numbering(files).items()}
    for name, (size, count) in sorted(sizes.items(), key=lambda item: -item[1][0]):
        yield f"{human(size):>12}  {name}" + (f" ({count} files)" if count > 1 else "")


def _choices(variants: Sequence[Variant]) -> list[str]:
    from mlx_moe.formats.hub_plan import human

    return [_clipped(f"{human(variant.size):>12}  --include {variant.pattern!r}") for variant in variants]


def _clipped(line: str) -> str:
    """Long names lose their middle, where a terminal is the reader."""
    if len(line) <= WIDTH or not sys.stdout.isatty():
        return line
    half = (WIDTH - 1) // 2
    return f"{line[:half]}…{line[-half:]}"
