"""Windows of up to 8 tokens: rows do not depend on each other, and a rollback leaves no trace."""

from __future__ import annotations

import copy
import random

import mlx.core as mx
import numpy as np
import pytest

import checkpoints
import mlx_moe
from mlx_moe.cache import WINDOW, begin, commit
from mlx_moe.formats.prompt_cache import load_prompt_cache, save_prompt_cache
from mlx_moe.formats.safetensors import FileFormatError
from mlx_moe.runtime import load_model

SHAPES = ("plain", "two_ple", "ratio_8", "wide_values", "four_grams")


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """(shape, dtype) -> model."""
    made = {}

    def get(name: str, dtype: mx.Dtype = mx.float32):
        if (name, dtype) not in made:
            raw = checkpoints.tiny_config(**checkpoints.SHAPES[name])
            folder = checkpoints.write(tmp_path_factory.mktemp("m"), raw, checkpoints.random_weights(raw, 3, mtp=True))
            made[name, dtype] = load_model(folder, dtype=dtype)[0]
        return made[name, dtype]

    return get


def _bits(cache) -> list[np.ndarray]:
    """Every array and number of a cache, comparable bit for bit."""
    out = []
    for layer in cache:
        for value in layer.state:
            if isinstance(value, mx.array):
                out.append(np.array(value.astype(mx.float32)))
            elif value is not None:
                out.append(np.array(value))
    return out


def _same(a, b) -> bool:
    return len(a) == len(b) and all(np.array_equal(x, y) for x, y in zip(a, b, strict=True))


def _ids(count: int, seed: int = 0) -> mx.array:
    return mx.array(checkpoints.tokens(count, seed)[None])


@pytest.mark.sample(1)
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16, mx.float16])
@pytest.mark.parametrize("name", SHAPES)
def test_window_rows_are_bit_equal_to_steps(models, name, dtype):
    """Logits and states of a window of n tokens equal n single steps, for n = 1 to 8, before and beyond the budget."""
    model = models(name, dtype)
    for prompt in (3, 33, 61):
        ids = _ids(prompt + WINDOW, seed=prompt)
        for n in range(2, WINDOW + 1):
            stepped, windowed = model.make_cache(), model.make_cache()
            model(ids[:, :prompt], cache=stepped)
            model(ids[:, :prompt], cache=windowed)
            rows = [model(ids[:, t : t + 1], cache=stepped) for t in range(prompt, prompt + n)]
            window = model(ids[:, prompt : prompt + n], cache=windowed)
            assert mx.array_equal(mx.concatenate(rows, axis=1), window), f"{name} {dtype}: {n} rows after {prompt}"
            assert _same(_bits(stepped), _bits(windowed)), f"{name} {dtype}: states, {n} rows after {prompt}"


@pytest.fixture(scope="module")
def demo():
    """The demonstration model, as a user loads it."""
    return mlx_moe.load_model()[0]


@pytest.mark.full
@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("prompt", [3, 255])
def test_windows_of_the_demonstration_model_are_bit_equal_to_steps(demo, prompt, rows):
    """8 tokens in windows of 1 to 8, on the device that MLX has.

    The second prompt ends where buffers grow (256 positions) and where attention becomes sparse (259).
    """
    ids = np.random.default_rng(prompt).integers(0, demo.config.vocab_size, (rows, prompt + WINDOW))
    ids = mx.array(ids.astype(np.int32))
    start = demo.make_cache()
    demo(ids[:, :prompt], cache=start)
    stepped = None
    for n in range(1, WINDOW + 1):
        cache = copy.deepcopy(start)
        parts = [demo(ids[:, t : t + n], cache=cache) for t in range(prompt, prompt + WINDOW, n)]
        logits, states = mx.concatenate(parts, axis=1), _bits(cache)
        stepped = stepped or (logits, states)
        different = mx.any(logits != stepped[0], axis=(0, 2)).tolist()
        assert not any(different), f"windows of {n} after {prompt}: tokens whose logits differ: {different}"
        assert _same(states, stepped[1]), f"windows of {n} after {prompt}: states"


def _roll_back_and_continue(model, prompt: int, steps: int, drop: int, pieces: str) -> None:
    """After ``steps`` tokens in a window, dropping ``drop`` and going on equals never having taken those."""
    ids, other = _ids(prompt + steps, seed=prompt), _ids(5, seed=99)
    taken, never = model.make_cache(), model.make_cache()
    if prompt:
        model(ids[:, :prompt], cache=taken)
        model(ids[:, :prompt], cache=never)
    model.begin(taken)
    size = {"steps": 1, "window": steps, "pieces": 3}[pieces]
    for i in range(prompt, prompt + steps, size):
        model(ids[:, i : min(i + size, prompt + steps)], cache=taken)
    model.rollback(taken, drop)
    for t in range(prompt, prompt + steps - drop):
        model(ids[:, t : t + 1], cache=never)
    where = f"after {prompt}, {steps} taken by {pieces}, {drop} dropped"
    if prompt + steps - drop:
        assert _same(_bits(taken), _bits(never)), f"states differ: {where}"
    for t in range(other.shape[1]):
        a, b = model(other[:, t : t + 1], cache=taken), model(other[:, t : t + 1], cache=never)
        assert mx.array_equal(a, b), f"logits differ at token {t}: {where}"
    assert _same(_bits(taken), _bits(never)), f"states differ in the end: {where}"


def _cases(count: int | None):
    cases = [
        (name, prompt, steps, drop, pieces)
        for name in SHAPES
        for prompt in (0, 2, 31, 61)
        for steps in range(1, WINDOW + 1)
        for drop in range(steps + 1)
        for pieces in ("steps", "window", "pieces")
    ]
    seed = random.randrange(1 << 30)
    return cases if count is None else random.Random(seed).sample(cases, count), seed


def test_rollback_is_as_if_never_taken(models):
    cases, seed = _cases(12)
    print("seed", seed)
    for name, *case in cases:
        _roll_back_and_continue(models(name), *case)


@pytest.mark.full
@pytest.mark.parametrize("name", SHAPES)
def test_rollback_everywhere(models, name):
    """Every number of steps and drops up to 8, taken singly, at once and in pieces."""
    for shape, *case in _cases(None)[0]:
        if shape == name:
            _roll_back_and_continue(models(name), *case)


def test_rollback_of_the_mtp_cache(models):
    model = models("plain")
    ids = _ids(50)
    streams = model.streams(ids)
    for drop in range(WINDOW + 1):
        taken, never = model.mtp.make_cache(), model.mtp.make_cache()
        for cache in (taken, never):
            model.draft(streams[:, :37], ids[:, 1:38], cache)
        begin(taken)
        model.draft(streams[:, 37:45], ids[:, 38:46], taken)
        commit(taken, WINDOW - drop)
        for t in range(37, 45 - drop):
            model.draft(streams[:, t : t + 1], ids[:, t + 1 : t + 2], never)
        assert _same(_bits(taken), _bits(never)), f"{drop} dropped"


def test_the_expert_source_hears_of_windows(models, monkeypatch):
    """It learns of every pass, drafts too, and of what a window kept."""
    model, heard = models("plain"), []
    monkeypatch.setattr(type(model._experts), "begin", lambda self, ids: heard.append(("begin", tuple(ids.shape))))
    monkeypatch.setattr(type(model._experts), "commit", lambda self, accepted: heard.append(("commit", accepted)))
    cache = model.make_cache()
    model.begin(cache)
    streams = model.streams(_ids(4), cache)
    model.rollback(cache, 1)
    model.draft(streams[:, :3], _ids(3), model.mtp.make_cache())
    assert heard == [("begin", (1, 4)), ("commit", 3), ("begin", (1, 3))]


def test_windows_refuse_misuse(models):
    model = models("plain")
    cache = model.make_cache()
    with pytest.raises(RuntimeError, match="no window"):
        commit(cache, 0)
    begin(cache)
    with pytest.raises(RuntimeError, match="already open"):
        begin(cache)
    with pytest.raises(ValueError, match="at most 8"):
        model(_ids(9), cache=cache)
    fresh = model.make_cache()
    begin(fresh)
    model(_ids(5), cache=fresh)
    with pytest.raises(ValueError, match="at most 8"):
        model(_ids(4), cache=fresh)
    with pytest.raises(ValueError, match="holds"):
        commit(model_cache_with_window(model), 4)


def model_cache_with_window(model):
    """A cache with an open window of three tokens."""
    cache = model.make_cache()
    begin(cache)
    model(_ids(3), cache=cache)
    return cache


def test_cache_protocol(models):
    """mlx-lm's view of a cache: size, bytes, emptiness, not trimmable, from_state."""
    from mlx_lm.models.cache import can_trim_prompt_cache, make_prompt_cache

    model = models("two_ple")
    cache = make_prompt_cache(model)
    assert all(layer.empty() and layer.size() == 0 and layer.nbytes == 0 for layer in cache)
    model(_ids(45), cache=cache)
    mx.eval([layer.state for layer in cache])
    assert not can_trim_prompt_cache(cache)
    for layer in cache:
        assert layer.size() == layer.offset == 45 and not layer.empty() and layer.nbytes > 0
        assert layer.position.tolist() == [45] and layer.position.dtype == mx.int32
    again = [type(layer).from_state(layer.state) for layer in cache]
    follow = _ids(5, seed=4)
    assert mx.array_equal(model(follow, cache=cache), model(follow, cache=again))


@pytest.mark.parametrize("length", [1, 7, 45])
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
def test_save_and_load(models, tmp_path, dtype, length):
    model = models("two_ple", dtype)
    cache = model.make_cache()
    model(_ids(length), cache=cache)
    path = tmp_path / "cache.safetensors"
    save_prompt_cache(path, cache, {"name": "x"})
    again, metadata = load_prompt_cache(path, model, return_metadata=True)
    assert metadata == {"name": "x"}
    assert _same(_bits(cache), _bits(again))
    follow = _ids(9, seed=4)
    assert mx.array_equal(model(follow, cache=cache), model(follow, cache=again))


def test_load_refuses_other_models(models, tmp_path):
    path = tmp_path / "cache.safetensors"
    cache = models("plain").make_cache()
    models("plain")(_ids(20), cache=cache)
    save_prompt_cache(path, cache)
    for other in (models("two_ple"), models("wide_values"), models("ratio_8"), models("plain", mx.bfloat16)):
        with pytest.raises(FileFormatError, match="another model"):
            load_prompt_cache(path, other)
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(FileFormatError, match="truncated"):
        load_prompt_cache(path, models("plain"))
