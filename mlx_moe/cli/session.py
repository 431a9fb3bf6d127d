"""What the verbs do alike once their options are parsed: load, template, sample, show progress."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
from huggingface_hub.utils import tqdm
from mlx_lm.sample_utils import make_sampler
from mlx_lm.tokenizer_utils import TokenizerWrapper

from mlx_moe.cli import options
from mlx_moe.loading import load
from mlx_moe.models.qwen4_exp import Model
from mlx_moe.runtime import model_folder


def open_model(args: argparse.Namespace, **changes: Any) -> tuple[Model, TokenizerWrapper, Path]:
    """Model, tokenizer and folder for --model, --mtp, --dtype and the options of paging.

    changes: keywords of ``load`` that replace those.
    """
    source = model_folder(args.model)
    dtype = getattr(mx, args.dtype) if args.dtype else None
    mtp = None if args.mtp == "none" else args.mtp
    model, tokenizer = load(source, dtype=dtype, mtp=mtp, **options.paging(args) | changes)
    return model, tokenizer, source if source.is_dir() else source.parent


def sampler(args: argparse.Namespace, tokenizer: TokenizerWrapper) -> Callable[[mx.array], mx.array]:
    """mlx-lm's sampler from the options; also sets the seed. Raises ValueError for a setting out of range."""
    _check_sampling(args, len(tokenizer))
    if args.seed is not None:
        mx.random.seed(args.seed)
    special = tokenizer.encode("\n", add_special_tokens=False) + list(tokenizer.eos_token_ids)
    return make_sampler(
        args.temp,
        args.top_p,
        args.min_p,
        args.min_tokens_to_keep,
        top_k=args.top_k,
        xtc_probability=args.xtc_probability,
        xtc_threshold=args.xtc_threshold,
        xtc_special_tokens=special,
    )


def _check_sampling(args: argparse.Namespace, vocabulary: int) -> None:
    """mlx-lm takes some of these as they are and samples nonsense, or fails in the middle of a text."""
    allowed = {
        "temp": (0, float("inf"), "0 or more"),
        "top_p": (0, 1, "0 to 1"),
        "min_p": (0, 1, "0 to 1"),
        "top_k": (0, vocabulary - 1, f"0 to {vocabulary - 1}"),
        "min_tokens_to_keep": (1, vocabulary, f"1 to {vocabulary}"),
        "xtc_probability": (0, 1, "0 to 1"),
        "xtc_threshold": (0, 0.5, "0 to 0.5"),
    }
    for name, (low, high, text) in allowed.items():
        if not low <= getattr(args, name) <= high:
            raise ValueError(f"--{name.replace('_', '-')} is {getattr(args, name)}; allowed: {text}")


def uses_template(args: argparse.Namespace, tokenizer: TokenizerWrapper) -> bool:
    """Whether the prompt goes through the chat template. Raises ValueError for options that would be lost without."""
    if tokenizer.has_chat_template and not args.ignore_chat_template:
        return True
    for flag in ("system_prompt", "prefill_response", "chat_template_config"):
        if getattr(args, flag, None) not in (None, {}):
            raise ValueError(f"--{flag.replace('_', '-')} needs a chat template, and none is used here")
    return False


def user_message(args: argparse.Namespace, text: str) -> list[dict[str, str]]:
    """A conversation of one message, after the system prompt if there is one."""
    system = [{"role": "system", "content": args.system_prompt}] if args.system_prompt is not None else []
    return [*system, {"role": "user", "content": text}]


def templated(
    tokenizer: TokenizerWrapper,
    messages: Sequence[Mapping[str, str]],
    options: Mapping[str, Any],
    prefill: str | None = None,
) -> list[int]:
    """Token ids of a conversation. prefill: how the answer starts. Raises ValueError for what the template refuses."""
    messages = list(messages) + ([{"role": "assistant", "content": prefill}] if prefill is not None else [])
    open_end = {"add_generation_prompt": prefill is None, "continue_final_message": prefill is not None}
    return _token_ids(tokenizer, messages, {**open_end, **options})


def templated_start(
    tokenizer: TokenizerWrapper, messages: Sequence[Mapping[str, str]], options: Mapping[str, Any]
) -> list[int]:
    """Token ids of a conversation whose last message goes on: nothing closes it."""
    return _token_ids(tokenizer, messages, {**options, "add_generation_prompt": False, "continue_final_message": True})


def _token_ids(
    tokenizer: TokenizerWrapper, messages: Sequence[Mapping[str, str]], options: Mapping[str, Any]
) -> list[int]:
    ids = _rendered(tokenizer, messages, options)
    if not isinstance(ids, list):
        raise ValueError(f"the chat template gave {type(ids).__name__}, not token ids; see --chat-template-config")
    return ids


def templated_rest(tokenizer: TokenizerWrapper, text: str, options: Mapping[str, Any]) -> list[int]:
    """Token ids of what follows ``templated_start``: the rest of the user's message and the start of the answer."""
    mark = "<rest-of-the-message>"
    options = {**options, "tokenize": False, "add_generation_prompt": True}
    whole, marked = (_rendered(tokenizer, [{"role": "user", "content": content}], options) for content in (text, mark))
    if mark not in marked:
        raise ValueError("the chat template drops the message, so a cached prompt cannot be continued with it")
    return tokenizer.encode(whole[marked.index(mark) :], add_special_tokens=False)


def _rendered(tokenizer: TokenizerWrapper, messages: Sequence[Mapping[str, str]], options: Mapping[str, Any]) -> Any:
    try:
        return tokenizer.apply_chat_template(list(messages), **options)
    except Exception as error:  # templates are programs of the model's authors and raise what they like
        raise ValueError(f"the chat template refused the conversation ({error})") from None


class Progress:
    """A progress bar on standard error for prompts that take several passes; silent where nobody watches."""

    def __init__(self, step: int):
        self._step, self._bar = step, None

    def __call__(self, done: int, total: int) -> None:
        if self._bar is None and total > self._step and sys.stderr.isatty():
            self._bar = tqdm(total=total, desc="Prompt", unit="tok", leave=False)
        if self._bar is not None:
            self._bar.update(done - self._bar.n)
            if done >= total:
                self._bar.close()


def inside_thinking(tokenizer: TokenizerWrapper, ids: Sequence[int]) -> bool:
    """Whether a text of token ids ends inside a thinking block."""
    if not tokenizer.has_thinking:
        return False
    return tokenizer.rfind_think_start(ids) > tokenizer.rfind_think_end(ids)
