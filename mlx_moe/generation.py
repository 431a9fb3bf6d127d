"""Generation: a loop over token ids, and text around it.

``generate_tokens`` is the loop; ``stream_generate`` and ``generate`` add text and statistics, with mlx-lm's signatures.
"""

from __future__ import annotations

import contextlib
import logging
import operator
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
from mlx_lm.generate import GenerationResponse
from mlx_lm.sample_utils import greedy_sampler
from mlx_lm.tokenizer_utils import TokenizerWrapper

from mlx_moe.cache import LayerCache
from mlx_moe.models.qwen4_exp import Model
from mlx_moe.paging.waits import Waits
from mlx_moe.platform import peak_memory_gb, wired_memory
from mlx_moe.profiling import Profile, Profiler

logger = logging.getLogger(__name__)

Sampler = Callable[[mx.array], mx.array]
LogitsProcessor = Callable[[mx.array, mx.array], mx.array]
Progress = Callable[[int, int], None]

CLEAR_EVERY = 256
"""Tokens between two releases of MLX's buffer cache."""

# What mlx-lm takes and this model cannot: the flags of the command line and the keywords here share the reasons.
UNSUPPORTED = {
    "max_kv_size": "the recurrent states and the block index of this model have no rotating form",
    "kv_bits": "sparse attention gathers single tokens from the key-value cache, which stays unquantised",
    "kv_group_size": "the key-value cache stays unquantised",
    "quantized_kv_start": "the key-value cache stays unquantised",
    "draft_model": "a separate draft model would need its own experts in memory",
    "num_draft_tokens": "drafting is not implemented yet",
    "adapter_path": "adapters are not supported",
}


@dataclass
class Response(GenerationResponse):
    """mlx-lm's; the last one of a text also says where its time went, and what paging took (GGUF files and packs)."""

    experts: Any = None  # paging.statistics.ExpertStats
    profile: Profile | None = None


@dataclass
class _Options:
    """Settings of one generation."""

    max_tokens: int = 256
    sampler: Sampler = greedy_sampler
    logits_processors: Sequence[LogitsProcessor] = ()
    prefill_step_size: int = 2048
    progress: Progress = lambda done, total: None
    waits: Waits = field(default_factory=Waits)

    def __post_init__(self) -> None:
        if self.max_tokens == 0 or self.max_tokens < -1:
            raise ValueError(f"max_tokens is {self.max_tokens}; allowed: 1 or more, or -1 for no limit")
        if self.prefill_step_size < 1:
            raise ValueError(f"prefill_step_size is {self.prefill_step_size}; allowed: 1 or more")


def generate_tokens(
    prompt: Sequence[int] | mx.array,
    model: Model,
    *,
    max_tokens: int = 256,
    sampler: Sampler | None = None,
    logits_processors: Sequence[LogitsProcessor] | None = None,
    prompt_cache: Sequence[LayerCache] | None = None,
    prefill_step_size: int = 2048,
    prompt_progress_callback: Progress | None = None,
    waits: Waits | None = None,
) -> Iterator[tuple[int, mx.array]]:
    """Token ids after a prompt of token ids, without stopping at any of them.

    Args:
        prompt: at least one id; continues ``prompt_cache`` if given.
        max_tokens: how many to generate, -1 for no limit.
        sampler: log probabilities [1, V] -> ids [1]; default greedy. See mlx_lm.sample_utils.
        logits_processors: functions of (all ids so far, logits [1, V]) -> logits.
        prompt_cache: from ``model.make_cache()``; advanced in place by the prompt and every token yielded.
        prefill_step_size: prompt tokens per pass.
        prompt_progress_callback: called with (tokens done, total).
        waits: counts for how long the loop waits for the device.

    Yields:
        (id, log probabilities [V]). The next token is under way when one is yielded. A generator belongs to the thread
        that runs it; another one may close it, and the cache is complete only if it was not closed so.

    Raises:
        ValueError: an empty prompt, an id outside the vocabulary, or a setting out of range.
    """
    options = _Options(
        max_tokens=max_tokens,
        sampler=sampler or greedy_sampler,
        logits_processors=logits_processors or (),
        prefill_step_size=prefill_step_size,
        progress=prompt_progress_callback or (lambda done, total: None),
        waits=waits or Waits(),
    )
    ids = _check_prompt(prompt, model)
    cache = model.make_cache() if prompt_cache is None else prompt_cache
    context = model.config.max_position_embeddings
    if cache[0].size() + ids.size > context:
        logger.warning("the prompt ends at token %d; the model's context is %d", cache[0].size() + ids.size, context)
    return _run(ids, model, cache, options)


def process_prompt(
    prompt: Sequence[int] | mx.array,
    model: Model,
    cache: Sequence[LayerCache],
    prefill_step_size: int = 2048,
    progress: Progress | None = None,
) -> None:
    """Run a prompt through the model, so that ``cache`` holds all of it; nothing is generated."""
    options = _Options(prefill_step_size=prefill_step_size, progress=progress or (lambda done, total: None))
    ids = _check_prompt(prompt, model)
    last = _prefill(ids, model, cache, options)
    model.streams(last[None], cache)
    mx.eval([layer.state for layer in cache])
    options.progress(ids.size, ids.size)


def _run(ids: mx.array, model: Model, cache: Sequence[LayerCache], options: _Options) -> Iterator[tuple[int, mx.array]]:
    model.relieve_memory()
    total = ids.size
    seen = ids if options.logits_processors else None

    def step(new: mx.array) -> tuple[mx.array, mx.array]:
        logits = model(new[None], cache=cache)[:, -1]
        for processor in options.logits_processors:
            logits = processor(seen, logits)
        logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
        return options.sampler(logprobs), logprobs[0]

    try:
        ids = _prefill(ids, model, cache, options)
        token, logprobs = step(ids)
        mx.async_eval(token, logprobs)
        count = 0
        while True:
            if seen is not None:
                seen = mx.concatenate([seen, token.astype(seen.dtype)])
            upcoming = step(token)
            mx.async_eval(*upcoming)
            with options.waits.on_device():
                value = token.item()
            if count == 0:
                options.progress(total, total)
            yield value, logprobs
            count += 1
            if count == options.max_tokens:
                break
            token, logprobs = upcoming
            if count % CLEAR_EVERY == 0:
                mx.clear_cache()
    except GeneratorExit:
        with contextlib.suppress(RuntimeError):  # closed by another thread, which has not this one's streams
            mx.eval([layer.state for layer in cache])
        raise
    mx.eval([layer.state for layer in cache])  # complete, so that another thread can go on


def _prefill(ids: mx.array, model: Model, cache: Sequence[LayerCache], options: _Options) -> mx.array:
    """Run all of the prompt but its last token, in pieces; returns that token, [1]."""
    total, done = ids.size, 0
    options.progress(0, total)
    while total - done > 1:
        piece = min(options.prefill_step_size, total - 1 - done)
        model.streams(ids[None, done : done + piece], cache)
        mx.eval([layer.state for layer in cache])
        mx.clear_cache()
        done += piece
        options.progress(done, total)
    return ids[done:]


def _check_prompt(prompt: Sequence[int] | mx.array, model: Model) -> mx.array:
    try:
        ids = [operator.index(item) for item in (prompt.tolist() if hasattr(prompt, "tolist") else prompt)]
    except TypeError:
        raise ValueError("the prompt is not a list of token ids, which are whole numbers") from None
    if not ids:
        raise ValueError("the prompt is empty; give at least one token")
    low, high, vocab = min(ids), max(ids), model.config.vocab_size
    if low < 0 or high >= vocab:
        raise ValueError(f"token id {low if low < 0 else high} is outside the vocabulary of {vocab}")
    return mx.array(ids, dtype=mx.int32)


def stream_generate(
    model: Model,
    tokenizer: Any,
    prompt: str | Sequence[int] | mx.array,
    max_tokens: int = 256,
    **kwargs: Any,
) -> Iterator[Response]:
    """Generate text piece by piece, stopping at the tokenizer's stop tokens.

    Args:
        tokenizer: mlx-lm's wrapper or a transformers tokenizer.
        prompt: text, or token ids.
        max_tokens: -1 for no limit.
        kwargs: the keywords of ``generate_tokens``.

    Yields:
        Response; the last one has a finish_reason, "stop" or "length".
    """
    for name, reason in UNSUPPORTED.items():
        if kwargs.pop(name, None):
            raise ValueError(f"{name} cannot be used with this model: {reason}")
    if not isinstance(tokenizer, TokenizerWrapper):
        tokenizer = TokenizerWrapper(tokenizer)
    ids = encode_prompt(tokenizer, prompt)
    waits = Waits()
    tokens = generate_tokens(ids, model, max_tokens=max_tokens, waits=waits, **kwargs)
    return _responses(tokens, tokenizer, len(ids), max_tokens, _counting(model), Profiler(model, waits))


def encode_prompt(tokenizer: TokenizerWrapper, prompt: str | Sequence[int] | mx.array) -> list[int]:
    """Token ids of a prompt; special tokens are added unless the text starts with them."""
    if isinstance(prompt, str):
        add = tokenizer.bos_token is None or not prompt.startswith(tokenizer.bos_token)
        return list(tokenizer.encode(prompt, add_special_tokens=add))
    return prompt.tolist() if isinstance(prompt, mx.array) else list(prompt)


def _counting(model: Model) -> Callable[[], Any]:
    """What streaming takes from now on, whenever it is called."""
    start = model.experts_stats
    return (lambda: None) if start is None else (lambda: model.experts_stats.since(start))


def _responses(
    tokens: Iterator[tuple[int, mx.array]],
    tokenizer: TokenizerWrapper,
    prompt_tokens: int,
    max_tokens: int,
    experts: Callable[[], Any],
    profiler: Profiler,
) -> Iterator[Response]:
    detokenizer = tokenizer.detokenizer
    started = time.perf_counter()
    prompt_tps = 0.0
    with wired_memory():
        try:
            for count, (token, logprobs) in enumerate(tokens, 1):
                if count == 1:
                    prompt_tps = prompt_tokens / (time.perf_counter() - started)
                    started = time.perf_counter()
                    profiler.start()
                reason = None
                if token in tokenizer.eos_token_ids:
                    reason = "stop"
                else:
                    detokenizer.add_token(token)
                    reason = "length" if count == max_tokens else None
                if reason:
                    detokenizer.finalize()
                yield Response(
                    text=detokenizer.last_segment,
                    token=token,
                    logprobs=logprobs,
                    from_draft=False,
                    prompt_tokens=prompt_tokens,
                    prompt_tps=prompt_tps,
                    generation_tokens=count,
                    generation_tps=count / (time.perf_counter() - started),
                    peak_memory=peak_memory_gb(),
                    finish_reason=reason,
                    experts=experts() if reason else None,
                    profile=profiler.profile(count - 1) if reason else None,
                )
                if reason:
                    return
        finally:
            tokens.close()


def generate(
    model: Model, tokenizer: Any, prompt: str | Sequence[int] | mx.array, verbose: bool = False, **kwargs: Any
) -> str:
    """Generate a whole text; with ``verbose`` print it as it comes, and mlx-lm's closing lines.

    Arguments as for ``stream_generate``. Ctrl-C while printing ends with the text so far.
    """
    text, last = "", None
    if verbose:
        print("=" * 10)
    try:
        for last in stream_generate(model, tokenizer, prompt, **kwargs):
            text += last.text
            if verbose:
                print(last.text, end="", flush=True)
    except KeyboardInterrupt:
        if not verbose:
            raise
    if verbose:
        print_closing_lines(last)
    return text


def print_closing_lines(last: GenerationResponse | None) -> None:
    """The three lines that end mlx-lm's verbose output, and what streamed experts in memory at the start came from."""
    print()
    print("=" * 10)
    if last is None:
        print("No text generated for this prompt")
        return
    print(f"Prompt: {last.prompt_tokens} tokens, {last.prompt_tps:.3f} tokens-per-sec")
    print(f"Generation: {last.generation_tokens} tokens, {last.generation_tps:.3f} tokens-per-sec")
    print(f"Peak memory: {last.peak_memory:.3f} GB")
    experts = getattr(last, "experts", None)  # mlx-lm's own responses have none
    if experts is not None and experts.seed_hash is not None:
        print(f"Experts in memory at first: by {experts.seed}, {experts.seed_hash}")
