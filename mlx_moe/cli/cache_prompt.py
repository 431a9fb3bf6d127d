"""``mlx-moe cache-prompt``: process a long prompt once; ``mlx-moe generate --prompt-cache-file`` continues it."""

from __future__ import annotations

from collections.abc import Sequence

from mlx_moe.cli import options


def main(argv: Sequence[str] | None = None) -> int:
    """Parse, load, run the prompt, save the cache; returns the exit status."""
    out = options.parser("cache-prompt", "Process a prompt once and save its cache.")
    out.add_argument("--prompt", "-p", required=True, help="text, or '-' for standard input")
    out.add_argument("--prompt-cache-file", required=True, help="where to write, a .safetensors file")
    options.add_template(out)
    args = out.parse_args(argv)
    options.check_folder("--prompt-cache-file", args.prompt_cache_file)
    from mlx_moe.cli import session
    from mlx_moe.formats.prompt_cache import save_prompt_cache
    from mlx_moe.generation import encode_prompt, process_prompt

    text = options.read_prompt(args.prompt)
    model, tokenizer, _ = session.open_model(args)
    template = session.uses_template(args, tokenizer)
    if template:
        messages = session.user_message(args, text)
        ids = session.templated_start(tokenizer, messages, args.chat_template_config)
    else:
        ids = encode_prompt(tokenizer, text)
    cache = model.make_cache()
    process_prompt(ids, model, cache, args.prefill_step_size, session.Progress(args.prefill_step_size))
    source = args.model or ""
    save_prompt_cache(args.prompt_cache_file, cache, {"model": source, "template": str(template)})
    print(
        f"Saved {cache[0].size()} tokens, {sum(layer.nbytes for layer in cache) / 1e6:.1f} MB: {args.prompt_cache_file}"
    )
    return 0
