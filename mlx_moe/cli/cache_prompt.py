"""``mlx-moe cache-prompt``: process a long prompt once; ``mlx-moe generate --prompt-cache-file`` continues it."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from mlx_moe.cli import options


def main(argv: Sequence[str] | None = None) -> int:
    """Parse, load, run the prompt, save the cache; returns the exit status."""
    out = options.parser("cache-prompt", "Process a prompt once and save its cache.")
    out.add_argument("--prompt", "-p", required=True, help="text, or '-' for standard input")
    out.add_argument("--prompt-cache-file", required=True, help="where to write, a .safetensors file")
    args = out.parse_args(argv)
    if not Path(args.prompt_cache_file).resolve().parent.is_dir():
        raise ValueError(f"--prompt-cache-file {args.prompt_cache_file}: its folder does not exist")
    from mlx_moe.cli import session
    from mlx_moe.formats.prompt_cache import save_prompt_cache
    from mlx_moe.generation import encode_prompt, process_prompt

    text = sys.stdin.read() if args.prompt == "-" else args.prompt
    model, tokenizer, folder = session.open_model(args)
    ids = encode_prompt(tokenizer, text)
    cache = model.make_cache()
    process_prompt(ids, model, cache, args.prefill_step_size, session.Progress(args.prefill_step_size))
    save_prompt_cache(args.prompt_cache_file, cache, {"model": str(folder)})
    print(
        f"Saved {cache[0].size()} tokens, {sum(layer.nbytes for layer in cache) / 1e6:.1f} MB: {args.prompt_cache_file}"
    )
    return 0
