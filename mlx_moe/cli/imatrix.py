"""``mlx-moe imatrix``: importances of columns out of text, for ``mlx-moe convert --imatrix``."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from mlx_moe.cli import options


def main(argv: Sequence[str] | None = None) -> int:
    """Parse, load, run the text, write; returns the exit status."""
    out = options.plain_parser("imatrix", "Collect importances from text, for mlx-moe convert --imatrix.")
    out.add_argument("--model", help="model folder whose experts fit into memory (default: the demonstration model)")
    out.add_argument("--text", type=Path, nargs="+", required=True, help="UTF-8 files like what the model will read")
    out.add_argument("--out", type=Path, required=True, help="where to write, a .safetensors file")
    out.add_argument("--bytes", type=int, help="of each file (default: all)")
    out.add_argument("--context", type=int, default=2048, help="tokens at a time (default: 2048)")
    args = out.parse_args(argv)
    options.check_folder("--out", str(args.out))
    texts = [path.read_bytes()[: args.bytes].decode("utf-8", errors="ignore") for path in args.text]
    import mlx.core as mx

    from mlx_moe.conversion.collect import collect
    from mlx_moe.formats.checkpoint import atomic_path
    from mlx_moe.loading import load

    model, tokenizer = load(args.model)
    ids = [token for text in texts for token in tokenizer.encode(text, add_special_tokens=False)]
    importances = collect(model, ids, args.context, _say)
    with atomic_path(args.out) as temporary:
        mx.save_safetensors(str(temporary), importances, metadata={"tokens": str(len(ids))})
    print(f"Saved importances of {len(importances)} weights from {len(ids)} tokens: {args.out}")
    return 0


def _say(done: int, total: int) -> None:
    print(f"{done} of {total} tokens", end="\n" if done == total else "\r", file=sys.stderr, flush=True)
