"""Generation: the loop over ids, and the text around it."""

from __future__ import annotations

import itertools
import re
import sys
import threading
from typing import Any

import mlx.core as mx
import mlx_lm
import numpy as np
import pytest
from mlx_lm.sample_utils import make_logits_processors, make_sampler
from mlx_lm.tokenizer_utils import BPEStreamingDetokenizer, TokenizerWrapper

import mlx_moe
from checkpoints import random_weights, tokens, write
from mlx_moe import generate, generate_tokens, load_model, stream_generate
from mlx_moe.formats.tokenizer import load_tokenizer
from mlx_moe.generation import UNSUPPORTED, encode_prompt, process_prompt
from tiny_tokenizer import ENDOFTEXT, IM_END, save_tokenizer, short_config, tiny_tokenizer

PROMPT = tokens(29).tolist()
COUNT = 12


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    raw = short_config()
    return save_tokenizer(write(tmp_path_factory.mktemp("model"), raw, random_weights(raw, seed=2)))


@pytest.fixture(scope="module")
def model(folder):
    return load_model(folder, mx.float32)[0]


@pytest.fixture
def tokenizer() -> TokenizerWrapper:
    """A new one each time: tests add stop tokens."""
    return TokenizerWrapper(tiny_tokenizer(), BPEStreamingDetokenizer, eos_token_ids=[ENDOFTEXT, IM_END])


@pytest.fixture(scope="module")
def greedy(model) -> list[int]:
    """The greedy continuation of PROMPT, of varied tokens without a stop token."""
    ids = ids_of(generate_tokens(PROMPT, model, max_tokens=COUNT))
    assert len(set(ids)) > 5 and not {ENDOFTEXT, IM_END} & set(ids)
    return ids


def ids_of(stream) -> list[int]:
    return [token for token, _ in stream]


def bias(token: int, at: int, start: int):
    """A logits processor that forces ``token`` as the ``at``-th generated one after ``start`` ids."""

    def processor(seen: mx.array, logits: mx.array) -> mx.array:
        if seen.size != start + at:
            return logits
        return mx.where(mx.arange(logits.shape[-1]) == token, 1e4, logits)

    return processor


def assert_refused(call, pattern: str) -> None:
    """Refused at once, before anything is generated, in one line."""
    with pytest.raises(ValueError, match=pattern) as caught:
        call()
    assert "\n" not in str(caught.value)


def test_generate_is_the_function_whatever_was_imported_first():
    """A module of the same name once took its place."""
    assert mlx_moe.generate is sys.modules["mlx_moe.generation"].generate


# Ids


def test_greedy_is_the_argmax_of_the_whole_sequence(model, greedy):
    ids = list(PROMPT)
    for step in range(5):
        best = model(mx.array([ids]))[0, -1].argmax().item()
        assert best == greedy[step], f"token {step}"
        ids.append(best)


@pytest.mark.parametrize("step", [1, 3, 7, 28, 29, 64, 2048])
def test_prefill_in_pieces_of_any_size(model, greedy, step):
    assert ids_of(generate_tokens(PROMPT, model, max_tokens=COUNT, prefill_step_size=step)) == greedy


@pytest.mark.parametrize("form", [tuple, np.array, mx.array, lambda ids: mx.array(ids, dtype=mx.uint32)])
def test_forms_of_a_prompt(model, greedy, form):
    assert ids_of(generate_tokens(form(PROMPT), model, max_tokens=2)) == greedy[:2]


@pytest.mark.parametrize("length", [1, 2, 3])
def test_short_prompts(model, length):
    ids = ids_of(generate_tokens(PROMPT[:length], model, max_tokens=3))
    assert ids[0] == model(mx.array([PROMPT[:length]]))[0, -1].argmax().item()
    assert len(ids) == 3


def test_log_probabilities(model):
    for token, logprobs in generate_tokens(PROMPT, model, max_tokens=3):
        assert logprobs.shape == (model.config.vocab_size,)
        assert abs(mx.exp(logprobs).sum().item() - 1) < 1e-4
        assert logprobs.argmax().item() == token


@pytest.mark.parametrize("prompt", [[], (), mx.array([], dtype=mx.int32)])
def test_empty_prompts(model, prompt):
    assert_refused(lambda: generate_tokens(prompt, model), "prompt is empty")


@pytest.mark.parametrize("bad", [-1, 128, 2**31, 2**32 + 5, -(2**40), 2**63 - 1, 2**70, -(2**70)])
@pytest.mark.parametrize("place", [0, 1, 2])
def test_ids_outside_the_vocabulary(model, bad, place):
    prompt = [5, 6, 7]
    prompt[place] = bad
    assert_refused(lambda: generate_tokens(prompt, model), f"{bad} is outside the vocabulary of 128")


@pytest.mark.parametrize(
    "prompt", [mx.array([[1, 2]]), mx.array(5), mx.array([1.5, 2.0]), [1.5, 2], [True, "a"], ["a"]]
)
def test_prompts_that_are_no_list_of_ids(model, prompt):
    with pytest.raises(ValueError, match="prompt is not a list of token ids"):
        generate_tokens(prompt, model)


@pytest.mark.parametrize("count", [0, -2, -100])
def test_max_tokens_out_of_range(model, tokenizer, count):
    assert_refused(lambda: generate_tokens(PROMPT, model, max_tokens=count), f"max_tokens is {count}")
    assert_refused(lambda: stream_generate(model, tokenizer, PROMPT, max_tokens=count), f"max_tokens is {count}")


@pytest.mark.parametrize("step", [0, -1])
def test_prefill_step_size_out_of_range(model, step):
    assert_refused(lambda: generate_tokens(PROMPT, model, prefill_step_size=step), f"prefill_step_size is {step}")
    assert_refused(
        lambda: process_prompt(PROMPT, model, model.make_cache(), step), f"prefill_step_size is {step}; allowed"
    )


def test_max_tokens(model, greedy):
    assert ids_of(generate_tokens(PROMPT, model, max_tokens=1)) == greedy[:1]
    assert ids_of(itertools.islice(generate_tokens(PROMPT, model, max_tokens=-1), COUNT)) == greedy
    assert len(ids_of(generate_tokens(PROMPT, model, max_tokens=7))) == 7


def test_buffers_are_released_now_and_then(model, monkeypatch):
    monkeypatch.setattr(sys.modules["mlx_moe.generation"], "CLEAR_EVERY", 3)
    calls = []
    monkeypatch.setattr(mx, "clear_cache", lambda: calls.append(1))
    ids_of(generate_tokens([5], model, max_tokens=10))
    assert len(calls) == 3


# Caches


@pytest.mark.parametrize("cut", [1, 4, 10, 28])
def test_a_prompt_in_two_calls_is_one_prompt(model, greedy, cut):
    cache = model.make_cache()
    process_prompt(PROMPT[:cut], model, cache)
    assert cache[0].size() == cut
    assert ids_of(generate_tokens(PROMPT[cut:], model, max_tokens=COUNT, prompt_cache=cache)) == greedy


@pytest.mark.parametrize("count", [1, 2, 5])
def test_the_cache_holds_every_token_yielded(model, greedy, count):
    cache = model.make_cache()
    first = ids_of(generate_tokens(PROMPT, model, max_tokens=count, prompt_cache=cache))
    assert {layer.size() for layer in cache} == {len(PROMPT) + count}
    # What follows is what the model says after all of it and one more token
    rest = ids_of(generate_tokens([7], model, max_tokens=3, prompt_cache=cache))
    assert rest == ids_of(generate_tokens([*PROMPT, *first, 7], model, max_tokens=3))


@pytest.mark.parametrize("taken", [0, 1, 4])
def test_a_generator_closed_early_leaves_a_usable_cache(model, greedy, taken):
    cache = model.make_cache()
    stream = generate_tokens(PROMPT, model, max_tokens=-1, prompt_cache=cache)
    assert ids_of(itertools.islice(stream, taken)) == greedy[:taken]
    stream.close()
    held = len(PROMPT) + taken if taken else 0
    assert {layer.size() for layer in cache} == {held}
    want = ids_of(generate_tokens(([*PROMPT, *greedy[:taken]] if taken else []) + [9, 8], model, max_tokens=3))
    assert ids_of(generate_tokens([9, 8], model, max_tokens=3, prompt_cache=cache)) == want


def test_a_text_stream_closed_early_leaves_a_usable_cache(model, tokenizer, greedy):
    cache = model.make_cache()
    stream = stream_generate(model, tokenizer, PROMPT, prompt_cache=cache)
    assert [next(stream).token for _ in range(3)] == greedy[:3]
    stream.close()
    assert {layer.size() for layer in cache} == {len(PROMPT) + 3}
    want = ids_of(generate_tokens([*PROMPT, *greedy[:3], 9], model, max_tokens=3))
    assert ids_of(generate_tokens([9], model, max_tokens=3, prompt_cache=cache)) == want


def test_a_cache_goes_on_in_another_thread(model, greedy):
    """What a generator leaves behind is complete: nothing of it waits for the thread that began."""
    cache, found = model.make_cache(), []

    def begin() -> None:
        stream = generate_tokens(PROMPT, model, prompt_cache=cache)
        found.extend(ids_of(itertools.islice(stream, 3)))
        stream.close()

    thread = threading.Thread(target=begin)
    thread.start()
    thread.join(60)
    assert found == greedy[:3]
    want = ids_of(generate_tokens([*PROMPT, *greedy[:3], 9], model, max_tokens=3))
    assert ids_of(generate_tokens([9], model, max_tokens=3, prompt_cache=cache)) == want


def test_a_cache_of_another_model_is_refused(model):
    cache = model.make_cache()[:-1]
    with pytest.raises(ValueError, match="the cache has 1 layers; the model has 2"):
        next(generate_tokens(PROMPT, model, prompt_cache=cache))


def test_progress(model):
    calls: list[tuple[int, int]] = []
    record = lambda done, total: calls.append((done, total))  # noqa: E731
    next(generate_tokens(PROMPT, model, prefill_step_size=10, prompt_progress_callback=record))
    assert calls == [(0, 29), (10, 29), (20, 29), (28, 29), (29, 29)]
    calls.clear()
    ids_of(generate_tokens(PROMPT[:1], model, max_tokens=3, prompt_progress_callback=record))
    assert calls == [(0, 1), (1, 1)]
    calls.clear()
    process_prompt(PROMPT, model, model.make_cache(), 28, record)
    assert calls == [(0, 29), (28, 29), (29, 29)]


# Sampling


def test_seeded_sampling_is_reproducible(model):
    runs = []
    for seed in (1, 1, 2):
        mx.random.seed(seed)
        runs.append(ids_of(generate_tokens(PROMPT, model, max_tokens=COUNT, sampler=make_sampler(1.0))))
    assert runs[0] == runs[1]
    assert runs[0] != runs[2]


@pytest.mark.parametrize(
    "options",
    [
        {"temp": 1.0, "top_k": 1},
        {"temp": 1.0, "top_p": 1e-6},
        {"temp": 1.0, "min_p": 1.0},
        {"temp": 1e-4},
        {"temp": 0.0, "top_p": 0.9, "top_k": 20},
    ],
    ids=str,
)
def test_samplers_that_leave_one_choice_are_greedy(model, greedy, options):
    got = ids_of(generate_tokens(PROMPT, model, max_tokens=COUNT, sampler=make_sampler(**options)))
    assert got == greedy


def test_top_k_keeps_to_the_best(model):
    mx.random.seed(3)
    for token, logprobs in generate_tokens(PROMPT, model, max_tokens=8, sampler=make_sampler(2.0, top_k=3)):
        assert token in np.argsort(np.array(logprobs))[-3:].tolist()


def test_logit_bias(model, greedy):
    processors = make_logits_processors(logit_bias={greedy[0]: -1e4})
    got = ids_of(generate_tokens(PROMPT, model, max_tokens=COUNT, logits_processors=processors))
    assert greedy[0] not in got
    processors = make_logits_processors(logit_bias={65: 1e4})
    assert ids_of(generate_tokens(PROMPT, model, max_tokens=3, logits_processors=processors)) == [65, 65, 65]


def test_repetition_penalties_see_the_prompt_and_the_text(model):
    forced = make_logits_processors(logit_bias={65: 60.0, 66: 50.0})
    penalty = make_logits_processors(presence_penalty=20.0)
    got = ids_of(generate_tokens([5, 6], model, max_tokens=2, logits_processors=[*forced, *penalty]))
    assert got == [65, 66], "the second token is penalised for the first"
    got = ids_of(generate_tokens([5, 65], model, max_tokens=1, logits_processors=[*forced, *penalty]))
    assert got == [66], "the prompt counts"


def test_processors_see_all_ids_so_far(model, greedy):
    seen = []

    def record(ids: mx.array, logits: mx.array) -> mx.array:
        seen.append(ids.tolist())
        assert logits.shape == (1, 128)
        return logits

    ids_of(generate_tokens(PROMPT, model, max_tokens=3, logits_processors=[record], prefill_step_size=10))
    assert seen[:3] == [PROMPT, [*PROMPT, *greedy[:1]], [*PROMPT, *greedy[:2]]]


# Text


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_keywords_that_cannot_work_are_refused_by_name(model, tokenizer, name):
    assert_refused(lambda: stream_generate(model, tokenizer, PROMPT, **{name: 8}), f"{name} cannot be used")
    assert_refused(lambda: generate(model, tokenizer, PROMPT, **{name: 8}), re.escape(UNSUPPORTED[name]))


def test_keywords_without_a_value_are_passed_over(model, tokenizer, greedy):
    off: dict[str, Any] = {"max_kv_size": None, "kv_bits": None, "draft_model": None, "num_draft_tokens": 0}
    assert next(stream_generate(model, tokenizer, PROMPT, **off)).token == greedy[0]


def test_unknown_keywords(model, tokenizer):
    with pytest.raises(TypeError, match="temperature"):
        stream_generate(model, tokenizer, PROMPT, temperature=0.5)


def test_pieces_are_the_decoded_text(model, tokenizer, greedy):
    parts = list(stream_generate(model, tokenizer, PROMPT, max_tokens=COUNT))
    assert [part.token for part in parts] == greedy
    assert "".join(part.text for part in parts) == tokenizer.decode(greedy)
    assert [part.finish_reason for part in parts] == [None] * (COUNT - 1) + ["length"]
    assert [part.generation_tokens for part in parts] == list(range(1, COUNT + 1))
    assert {part.prompt_tokens for part in parts} == {len(PROMPT)}
    assert all(part.prompt_tps > 0 and part.generation_tps > 0 and part.peak_memory > 0 for part in parts)
    assert not any(part.from_draft for part in parts)
    assert parts[0].logprobs.shape == (128,)


def test_trailing_spaces_are_printed(model, tokenizer):
    """The detokenizer holds a space back until it knows what follows; the end must release it."""
    space = 2
    forced = [bias(65, 0, len(PROMPT)), bias(space, 1, len(PROMPT))]
    parts = list(stream_generate(model, tokenizer, PROMPT, max_tokens=2, logits_processors=forced))
    assert "".join(part.text for part in parts) == tokenizer.decode([65, space])


@pytest.mark.parametrize("stop", [IM_END, ENDOFTEXT])
@pytest.mark.parametrize("at", [0, 3])
def test_a_stop_token_ends_the_text_and_is_not_printed(model, tokenizer, greedy, stop, at):
    cache = model.make_cache()
    forced = [bias(stop, at, len(PROMPT))]
    parts = list(stream_generate(model, tokenizer, PROMPT, 50, logits_processors=forced, prompt_cache=cache))
    assert [part.token for part in parts] == [*greedy[:at], stop]
    assert parts[-1].finish_reason == "stop"
    text = "".join(part.text for part in parts)
    assert text == (tokenizer.decode(greedy[:at]) if at else "")
    assert cache[0].size() == len(PROMPT) + at + 1, "the cache holds the stop token"


def test_a_stop_token_in_the_last_place(model, tokenizer):
    forced = [bias(IM_END, 2, len(PROMPT))]
    parts = list(stream_generate(model, tokenizer, PROMPT, 3, logits_processors=forced))
    assert parts[-1].finish_reason == "stop"


def test_a_stop_token_in_the_prompt_stops_nothing(model, tokenizer):
    parts = list(stream_generate(model, tokenizer, [5, IM_END, 6], max_tokens=2))
    assert len(parts) == 2


def test_added_stop_tokens(model, tokenizer, greedy):
    tokenizer.add_eos_token(str(greedy[4]))
    at = greedy.index(greedy[4])
    parts = list(stream_generate(model, tokenizer, PROMPT, max_tokens=COUNT))
    assert [part.token for part in parts] == greedy[: at + 1]


def test_the_same_text_as_mlx_lm(model, tokenizer):
    for prompt in ("then the reading of it", PROMPT, mx.array(PROMPT)):
        ours = list(stream_generate(model, tokenizer, prompt, max_tokens=COUNT))
        theirs = list(mlx_lm.stream_generate(model, tokenizer, prompt, max_tokens=COUNT))
        assert [part.token for part in ours] == [part.token for part in theirs]
        assert [part.text for part in ours] == [part.text for part in theirs]
        assert [part.finish_reason for part in ours] == [part.finish_reason for part in theirs]
        assert ours[0].prompt_tokens == theirs[0].prompt_tokens
        worst = max(mx.abs(a.logprobs - b.logprobs).max().item() for a, b in zip(ours, theirs, strict=True))
        assert worst < 1e-4, f"log probabilities differ by {worst:.1e}"


def test_the_same_sampled_text_as_mlx_lm(model, tokenizer):
    runs = []
    for stream in (stream_generate, mlx_lm.stream_generate):
        mx.random.seed(5)
        options = {"sampler": make_sampler(0.8, top_p=0.95, top_k=20), "max_tokens": COUNT}
        processors = make_logits_processors(repetition_penalty=1.3)
        runs.append([p.token for p in stream(model, tokenizer, PROMPT, logits_processors=processors, **options)])
    assert runs[0] == runs[1]


def test_a_transformers_tokenizer_is_wrapped(model, greedy):
    parts = list(stream_generate(model, tiny_tokenizer(), PROMPT, max_tokens=4))
    assert [part.token for part in parts] == greedy[:4]
    assert "".join(part.text for part in parts) == tiny_tokenizer().decode(greedy[:4])


def test_special_tokens_are_added_once(tmp_path):
    save_tokenizer(tmp_path, bos=True)
    (tmp_path / "config.json").write_text('{"model_type": "qwen4_exp"}')
    tokenizer = load_tokenizer(tmp_path, {})
    plain = tokenizer.encode("the rest", add_special_tokens=False)
    assert encode_prompt(tokenizer, "the rest") == [ENDOFTEXT, *plain]
    assert encode_prompt(tokenizer, "<|endoftext|>the rest") == [ENDOFTEXT, *plain]
    assert encode_prompt(tokenizer, mx.array([1, 2])) == encode_prompt(tokenizer, (1, 2)) == [1, 2]


def test_generate_returns_the_text(model, tokenizer, greedy, capsys):
    assert generate(model, tokenizer, PROMPT, max_tokens=COUNT) == tokenizer.decode(greedy)
    assert capsys.readouterr().out == ""


def test_verbose_prints_mlx_lms_lines(model, tokenizer, greedy, capsys):
    text = generate(model, tokenizer, PROMPT, verbose=True, max_tokens=COUNT)
    out = capsys.readouterr().out
    number = r"\d+\.\d{3}"
    pattern = (
        "==========\n" + re.escape(text) + "\n==========\n"
        rf"Prompt: 29 tokens, {number} tokens-per-sec\n"
        rf"Generation: {COUNT} tokens, {number} tokens-per-sec\n"
        rf"Peak memory: {number} GB\n"
    )
    assert re.fullmatch(pattern, out), out


def test_an_empty_text(model, tokenizer, capsys):
    forced = [bias(IM_END, 0, len(PROMPT))]
    assert generate(model, tokenizer, PROMPT, verbose=True, logits_processors=forced) == ""
    assert "Generation: 1 tokens" in capsys.readouterr().out


@pytest.mark.parametrize("verbose", [True, False])
def test_ctrl_c(model, tokenizer, greedy, capsys, verbose):
    def interrupt(ids: mx.array, logits: mx.array) -> mx.array:
        if ids.size == len(PROMPT) + 4:
            raise KeyboardInterrupt
        return logits

    run = lambda: generate(model, tokenizer, PROMPT, verbose=verbose, logits_processors=[interrupt])  # noqa: E731
    if verbose:
        assert run() == tokenizer.decode(greedy[:3])
        assert "Generation: 3 tokens" in capsys.readouterr().out
    else:
        with pytest.raises(KeyboardInterrupt):
            run()


def test_ctrl_c_before_the_first_token(model, tokenizer, capsys):
    def interrupt(done: int, total: int) -> None:
        raise KeyboardInterrupt

    assert generate(model, tokenizer, PROMPT, verbose=True, prompt_progress_callback=interrupt) == ""
    assert "No text generated for this prompt" in capsys.readouterr().out
