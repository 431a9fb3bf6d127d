"""Prompt caches on disk: a round trip, and damage that is refused by the name of the file."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from checkpoints import random_weights, tiny_config, tokens, write
from mlx_moe import generate_tokens, load_model, load_prompt_cache, save_prompt_cache
from mlx_moe.formats.safetensors import FileFormatError
from mlx_moe.generation import process_prompt

FUZZ = 400
IDS = tokens(30).tolist()


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    raw = tiny_config()
    return load_model(write(tmp_path_factory.mktemp("model"), raw, random_weights(raw)), mx.float32)[0]


@pytest.fixture(scope="module")
def saved(model, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("cache") / "c.safetensors"
    cache = model.make_cache()
    process_prompt(IDS, model, cache)
    save_prompt_cache(path, cache, {"model": "tiny", "note": "zwölf"})
    return path


def rewritten(saved: Path, path: Path, header: dict[str, Any], arrays: dict[str, mx.array] | None = None) -> Path:
    """A copy with other metadata (a value of None leaves a key out) and other arrays."""
    old, metadata = mx.load(str(saved), return_metadata=True)
    metadata = {key: value for key, value in {**metadata, **header}.items() if value is not None}
    mx.save_safetensors(str(path), {**old, **(arrays or {})}, metadata)
    return path


def assert_refused(path: Path, model) -> str:
    with pytest.raises(FileFormatError) as caught:
        load_prompt_cache(path, model)
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("length", [1, 3, 4, 11, 30])
def test_round_trip(model, tmp_path, length):
    cache = model.make_cache()
    process_prompt(IDS[:length], model, cache)
    save_prompt_cache(tmp_path / "c.safetensors", cache, {"model": "tiny"})
    again, user = load_prompt_cache(tmp_path / "c.safetensors", model, return_metadata=True)
    assert user == {"model": "tiny"}
    assert [layer.size() for layer in again] == [length] * 4
    assert sum(layer.nbytes for layer in again) <= sum(layer.nbytes for layer in cache), "only what is used is saved"
    want = [token for token, _ in generate_tokens([7, 8], model, max_tokens=6, prompt_cache=cache)]
    assert [token for token, _ in generate_tokens([7, 8], model, max_tokens=6, prompt_cache=again)] == want


def test_without_metadata(model, tmp_path):
    cache = model.make_cache()
    process_prompt([1], model, cache)
    save_prompt_cache(tmp_path / "c.safetensors", cache)
    assert load_prompt_cache(tmp_path / "c.safetensors", model, return_metadata=True)[1] == {}


def test_a_file_of_many_uses(model, saved):
    runs = []
    for _ in range(2):
        cache = load_prompt_cache(saved, model)
        runs.append([token for token, _ in generate_tokens([5], model, max_tokens=4, prompt_cache=cache)])
    assert runs[0] == runs[1]


@pytest.mark.parametrize("version", ["0", "2", "x", None])
def test_other_versions(model, saved, tmp_path, version):
    path = rewritten(saved, tmp_path / "c.safetensors", {"format_version": version})
    assert "prompt cache format" in assert_refused(path, model)


LAYERS = ["", "{", "5", "null", "{}", "[]", "[5]", "[null]", "[{}]", '[{"class": "dict"}]', '[{"class": []}]']


@pytest.mark.parametrize("layers", [None, *LAYERS, "[" * 100_000], ids=lambda text: str(text)[:20])
def test_damaged_layers(model, saved, tmp_path, layers):
    assert_refused(rewritten(saved, tmp_path / "c.safetensors", {"layers": layers}), model)


@pytest.mark.parametrize("user", [None, "", "{", "[" * 100_000], ids=lambda text: str(text)[:20])
def test_damaged_metadata(model, saved, tmp_path, user):
    assert_refused(rewritten(saved, tmp_path / "c.safetensors", {"user": user}), model)


@pytest.mark.parametrize("layer", [0, 1, 3])
@pytest.mark.parametrize("value", [None, -1, 0, 1, 29, 31, 10**9, 2**70, 1.5, 30.0, "30", [30], {}, True], ids=str)
def test_hostile_numbers(model, saved, tmp_path, layer, value):
    good = json.loads(mx.load(str(saved), return_metadata=True)[1]["layers"])
    for field in ("offset", "ratio", "lengths"):
        layers = [dict(entry) for entry in good]
        if field in layers[layer]:
            layers[layer][field] = value
            path = tmp_path / f"{field}.safetensors"
            assert_refused(rewritten(saved, path, {"layers": json.dumps(layers)}), model)


def _arrays(path: Path) -> dict[str, mx.array]:
    return dict(mx.load(str(path)))


def test_misshapen_arrays(model, saved, tmp_path):
    for i, (name, value) in enumerate(_arrays(saved).items()):
        for k, other in enumerate((value[None], value.reshape(-1), value[..., :-1], value.astype(mx.int8))):
            path = rewritten(saved, tmp_path / f"{i}-{k}.safetensors", {}, {name: other})
            assert_refused(path, model)


def test_mutated_files(model, saved, tmp_path):
    """Damage to the header or the lengths is refused; a flipped bit in the data cannot be seen."""
    whole, rng = saved.read_bytes(), random.Random(4)
    size = 8 + int.from_bytes(whole[:8], "little")
    path = tmp_path / "c.safetensors"
    for i in range(FUZZ):
        content = bytearray(whole)
        content[rng.randrange(size)] = rng.choice((rng.randrange(256), *b'0123456789"[]{}:,'))
        path.unlink(missing_ok=True)
        path.write_bytes(content)
        try:
            cache = load_prompt_cache(path, model)
            next(generate_tokens([5], model, prompt_cache=cache))
        except FileFormatError as error:
            assert str(path) in str(error), f"mutation {i}: {error}"
