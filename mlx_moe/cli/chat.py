"""``mlx-moe chat``: a conversation in the terminal, with mlx-lm's keys: q quits, r resets, h helps."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from mlx_moe.cli import options

if TYPE_CHECKING:
    from mlx_moe.models.qwen4_exp import Model

HELP = "q: quit    r: start again    h: this help    Ctrl-C: stop an answer"


def main(argv: Sequence[str] | None = None) -> int:
    """Parse, load, talk until the user quits; returns the exit status."""
    out = options.parser("chat", "Talk with a model.")
    out.add_argument("--max-tokens", "-m", type=int, default=256, help="per answer, -1 for no limit (default: 256)")
    options.add_template(out, ignorable=False)
    options.add_sampling(out, temp=None, top_p=None, top_k=None)
    args = out.parse_args(argv)
    from mlx_moe.cli import session

    model, tokenizer, folder = session.open_model(args)
    if not tokenizer.has_chat_template:
        raise ValueError(f"{folder}: the tokenizer has no chat template; use mlx-moe generate")
    _own_sampling(args, folder, tokenizer.has_thinking)
    print(HELP)
    conversation = Conversation(model, tokenizer, args, session.sampler(args, tokenizer))
    while (line := _ask()) is not None:
        if line == "h":
            print(HELP)
        elif line == "r":
            conversation.reset()
        elif line:
            _say(conversation, line)
    return 0


class Conversation:
    """Messages so far and the cache that holds them.

    A turn feeds what the template adds to the tokens that the cache has seen. Where a template rewrites earlier turns
    (it drops old thinking blocks), the cache starts again.
    """

    def __init__(self, model: Model, tokenizer: Any, args: argparse.Namespace, sampler: Any):
        self._model, self._tokenizer, self._args, self._sampler = model, tokenizer, args, sampler
        self.reset()

    def reset(self) -> None:
        """Forget everything but the system prompt."""
        system = self._args.system_prompt
        self._messages = [] if system is None else [{"role": "system", "content": system}]
        self._cache, self._seen = self._model.make_cache(), []

    def answer(self, text: str) -> Iterator[str]:
        """Add a user's message; yields the answer piece by piece."""
        from mlx_moe.cli.session import Progress, templated
        from mlx_moe.generation import stream_generate

        self._messages.append({"role": "user", "content": text})
        ids = templated(self._tokenizer, self._messages, self._args.chat_template_config)
        if ids[: len(self._seen)] != self._seen or len(ids) == len(self._seen):
            self._cache, self._seen = self._model.make_cache(), []
        new, parts = ids[len(self._seen) :], []
        self._seen = ids
        try:
            for part in stream_generate(
                self._model,
                self._tokenizer,
                new,
                max_tokens=self._args.max_tokens,
                sampler=self._sampler,
                prompt_cache=self._cache,
                prefill_step_size=self._args.prefill_step_size,
                prompt_progress_callback=Progress(self._args.prefill_step_size),
            ):
                self._seen.append(part.token)
                parts.append(part.text)
                yield part.text
        finally:
            self._messages.append({"role": "assistant", "content": "".join(parts)})
            if any(layer.size() != len(self._seen) for layer in self._cache):  # stopped in mid-prompt or mid-pass
                self._cache, self._seen = self._model.make_cache(), []


def _own_sampling(args: argparse.Namespace, folder: Any, has_thinking: bool) -> None:
    """Fill in the settings that were not given on the command line."""
    from mlx_moe.sampling import chat_sampling

    own = chat_sampling(folder, has_thinking and args.chat_template_config.get("enable_thinking", True))
    for name in ("temp", "top_p", "top_k"):
        if getattr(args, name) is None:
            setattr(args, name, getattr(own, name))


def _ask() -> str | None:
    try:
        line = input(">> ").strip()
    except (EOFError, KeyboardInterrupt):
        print()
        return None
    return None if line == "q" else line


def _say(conversation: Conversation, line: str) -> None:
    answer = conversation.answer(line)
    try:
        for text in answer:
            print(text, end="", flush=True)
    except KeyboardInterrupt:
        answer.close()
    print()
