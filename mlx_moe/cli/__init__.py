"""``mlx-moe VERB``: one thin module per verb. Each parses, builds, calls and prints."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Sequence

VERBS = {
    "generate": "write text after a prompt",
    "chat": "talk with a model",
    "cache-prompt": "process a prompt once and save its cache",
    "convert": "make a pack whose experts stream from disk",
    "imatrix": "collect importances from text, for convert",
    "perplexity": "measure loss on text as decoding runs, and what cache-aware routing costs",
    "profile": "count which experts text uses, to start with these",
    "usage": "show or forget which experts were used",
    "plan": "say what would be in memory and what to expect",
    "info": "say what a model's files hold and what they cost",
    "doctor": "check the kernels on this machine",
    "download": "fetch a model from the Hub",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb; returns the exit status. Errors of use and of files are one line on standard error."""
    argv = list(sys.argv[1:] if argv is None else argv)
    if argv and argv[0] in VERBS:
        module = importlib.import_module(f"mlx_moe.cli.{argv[0].replace('-', '_')}")
        return _guarded(module.main, argv[1:])
    if argv and argv[0] in ("-V", "--version"):
        from mlx_moe import __version__

        print(f"mlx-moe {__version__}")
        return 0
    listing = "\n".join(f"  {verb:<14}{text}" for verb, text in VERBS.items())
    usage = f"usage: mlx-moe VERB [options]\n\nverbs:\n{listing}\n\nmlx-moe VERB --help lists a verb's options."
    if argv and argv[0] not in ("-h", "--help"):
        print(f"mlx-moe: error: unknown verb {argv[0]!r}; verbs: {', '.join(VERBS)}", file=sys.stderr)
        return 2
    print(usage, file=sys.stdout if argv else sys.stderr)
    return 0 if argv else 2


def _guarded(verb: Callable[[Sequence[str]], int], argv: Sequence[str]) -> int:
    try:
        return verb(argv)
    except (ValueError, OSError) as error:  # ConfigError and FileFormatError are ValueErrors
        print(f"mlx-moe: error: {' '.join(str(error).splitlines())}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return 130
