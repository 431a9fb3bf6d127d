"""``mlx-moe profile``: which experts text uses, for the first fill of a model whose experts stream."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from mlx_moe.cli import options


def main(argv: Sequence[str] | None = None) -> int:
    """Parse, load, run the text, write; returns the exit status."""
    out = options.parser("profile", "Count which experts text uses: a model starts with these.", prompts=False)
    out.add_argument("--text", type=Path, nargs="+", required=True, help="UTF-8 files; NUL bytes part documents")
    out.add_argument("--tokens", type=int, metavar="N", help="of each file (default: all)")
    out.add_argument("--context", type=int, default=2048, help="tokens at a time (default: 2048)")
    out.add_argument("--out", type=Path, metavar="FILE", help="where to write (default: where loading finds it)")
    args = out.parse_args(argv)
    if args.out is not None:
        options.check_folder("--out", str(args.out))
    for path in args.text:
        if not path.is_file():
            raise FileNotFoundError(f"{path}: no such file")
    if args.tokens is not None and args.tokens < 1:
        raise ValueError(f"--tokens is {args.tokens}; allowed: 1 or more")
    from mlx_moe.cli import session
    from mlx_moe.cli.usage import store_of
    from mlx_moe.documents import read_documents
    from mlx_moe.runtime import model_folder
    from mlx_moe.static_profile import profile

    store = store_of(model_folder(args.model))
    model, tokenizer, _ = session.open_model(args, usage=False)  # this text is not what the user writes
    texts = []
    for path in args.text:
        left = args.tokens
        for text in read_documents(path):
            ids = tokenizer.encode(text, add_special_tokens=False)[:left]
            texts.append(ids)
            left = None if left is None else left - len(ids)
            if left == 0:
                break
    with model:
        counts = profile(model, texts, args.context, _say)
    path = store.write("profile", counts, args.out)
    print(f"Saved a profile of {counts.tokens} tokens: {path}")
    return 0


def _say(done: int, total: int) -> None:
    print(f"{done} of {total} tokens", end="\n" if done == total else "\r", file=sys.stderr, flush=True)
