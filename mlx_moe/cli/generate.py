"""``mlx-moe generate``: text after a prompt, with mlx-lm's options and closing lines."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlx_moe.cli import options

if TYPE_CHECKING:
    from mlx_lm.tokenizer_utils import TokenizerWrapper

    from mlx_moe.profiling import Profile

INTERRUPTED = 130


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    out = options.parser("generate", "Write text after a prompt.")
    out.add_argument("--prompt", "-p", default="hello", help="text, or '-' for standard input (default: hello)")
    out.add_argument("--prefill-response", help="how the answer starts, with a chat template")
    out.add_argument("--max-tokens", "-m", type=int, default=100, help="-1 for no limit (default: 100)")
    out.add_argument("--extra-eos-token", nargs="+", default=(), help="further tokens that end the text")
    out.add_argument("--verbose", type=options.truth, default=True, help="T prints statistics, F the text alone")
    out.add_argument("--prompt-cache-file", help="continue a prompt that 'mlx-moe cache-prompt' saved")
    out.add_argument("--stats-json", metavar="FILE", help="write counts, rates, peak memory and streaming there")
    out.add_argument("--profile", action="store_true", help="also say where a token's time went")
    options.add_recording(out)
    options.add_template(out)
    options.add_sampling(out, temp=0.0, top_p=1.0, top_k=0)
    return out.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Parse, load, generate, print; returns the exit status."""
    args = _parse(argv)
    if args.stats_json:
        options.check_folder("--stats-json", args.stats_json)
    if args.record_routing:
        options.check_folder("--record-routing", args.record_routing)
    from mlx_moe.cli import session
    from mlx_moe.formats.prompt_cache import load_prompt_cache, read_prompt_cache_metadata
    from mlx_moe.generation import print_closing_lines, stream_generate

    text = options.read_prompt(args.prompt)
    saved = read_prompt_cache_metadata(args.prompt_cache_file) if args.prompt_cache_file else None
    if saved and args.model is None:
        args.model = saved.get("model") or None
    model, tokenizer, _ = session.open_model(args)
    _add_stop_tokens(tokenizer, args.extra_eos_token)
    cache = load_prompt_cache(args.prompt_cache_file, model) if args.prompt_cache_file else None
    prompt = _prompt_ids(args, tokenizer, text, saved)
    last, ids, status = None, [], 0
    if args.verbose:
        print("=" * 10)
    try:
        for last in stream_generate(
            model,
            tokenizer,
            prompt,
            max_tokens=args.max_tokens,
            sampler=session.sampler(args, tokenizer),
            prefill_step_size=args.prefill_step_size,
            prompt_cache=cache,
            prompt_progress_callback=session.Progress(args.prefill_step_size),
        ):
            ids.append(last.token)
            print(last.text, end="", flush=True)
    except KeyboardInterrupt:
        status = INTERRUPTED
    print_closing_lines(last) if args.verbose else print()
    profile = last.profile if args.profile and last is not None else None
    if profile is not None:
        print(profile)
    if session.inside_thinking(tokenizer, [*prompt, *ids]):
        print(_hint(args.max_tokens), file=sys.stderr)
    if args.stats_json:
        _write_stats(Path(args.stats_json), last, model, profile)
    model.close()
    return status


def _add_stop_tokens(tokenizer: TokenizerWrapper, names: Sequence[str]) -> None:
    """Further stop tokens, by name or id. (Tokenizers give unknown names the id of another token.)"""
    for name in names:
        if not name.isdecimal() and name not in tokenizer.get_vocab():
            raise ValueError(f"--extra-eos-token {name!r} is not a token of this model")
        tokenizer.add_eos_token(name)


def _prompt_ids(
    args: argparse.Namespace, tokenizer: TokenizerWrapper, text: str, saved: dict[str, str] | None
) -> list[int]:
    """Token ids of the prompt, or of what follows a cached one. saved: the cache's metadata."""
    from mlx_moe.cli import session
    from mlx_moe.generation import encode_prompt

    if saved is not None:
        for flag in ("system_prompt", "prefill_response"):
            if getattr(args, flag) is not None:
                raise ValueError(f"--{flag.replace('_', '-')} cannot be used with --prompt-cache-file")
        if saved.get("template") == "True" and not args.ignore_chat_template:
            return session.templated_rest(tokenizer, text, args.chat_template_config)
        return tokenizer.encode(text, add_special_tokens=False)  # in mid-text, so without a start token
    if not session.uses_template(args, tokenizer):
        return encode_prompt(tokenizer, text)
    messages = session.user_message(args, text)
    return session.templated(tokenizer, messages, args.chat_template_config, args.prefill_response)


def _hint(max_tokens: int) -> str:
    return (
        f"Hint: the text stopped inside a thinking block; raise --max-tokens (now {max_tokens}) or pass "
        """--chat-template-config '{"enable_thinking": false}'."""
    )


def _write_stats(path: Path, last: Any, model: Any, profile: Profile | None) -> None:
    from mlx_moe.formats.checkpoint import write_json

    names = ("prompt_tokens", "prompt_tps", "generation_tokens", "generation_tps", "peak_memory", "finish_reason")
    experts = getattr(last, "experts", None) or model.experts_stats  # of an interrupted text, since loading
    streaming = {} if experts is None else {"experts": experts.as_dict()}
    times = {} if profile is None else {"profile": profile.as_dict()}
    write_json(path, {name: getattr(last, name, None) for name in names} | streaming | times)
