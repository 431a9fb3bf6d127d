"""The demonstration model and its tokenizer, as shipped."""

from __future__ import annotations

import ast
import json
import random
import threading
import unicodedata

import mlx.core as mx
import numpy as np
import pytest

from mlx_moe import generate, load, stream_generate
from mlx_moe.config import FULL, ModelConfig
from mlx_moe.runtime import DEMO, load_model


@pytest.fixture(scope="module")
def demo():
    return load()


def _random_text(rng: random.Random) -> str:
    """Anything that UTF-8 can hold: planes, controls, marks, white space in runs, things that look like tokens."""
    pieces = []
    for _ in range(rng.randrange(1, 12)):
        kind = rng.randrange(7)
        if kind == 0:
            pieces.append(
                chr(rng.choice([*range(0xD800), *()]) if rng.random() < 0.5 else rng.randrange(0xE000, 0x110000))
            )
        elif kind == 1:
            pieces.append(rng.choice([" ", "\n", "\t", "\r\n", "\u2581", "\u00a0", "\ufeff"]) * rng.randrange(1, 9))
        elif kind == 2:
            pieces.append(
                rng.choice(["<0x41>", "<0x", "</s>", "<unk>", "<|end", "\ufffd", "\x00", "e\u0301", "👩‍👩‍👧"])
            )
        elif kind == 3:
            pieces.append("".join(chr(rng.randrange(32, 127)) for _ in range(rng.randrange(1, 20))))
        elif kind == 4:
            pieces.append(rng.choice(["def f(x):\n    return x", "It was a dark", "The 12,345th"]))
        elif kind == 5:
            pieces.append("".join(chr(rng.randrange(0x4E00, 0x9FFF)) for _ in range(rng.randrange(1, 6))))
        else:
            pieces.append("".join(chr(rng.randrange(0, 32)) for _ in range(rng.randrange(1, 4))))
    return "".join(pieces)


def _check_round_trips(tokenizer, count: int) -> None:
    seed = random.randrange(1 << 30)
    print("seed", seed)
    rng = random.Random(seed)
    for _ in range(count):
        text = _random_text(rng)
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert tokenizer.decode(ids) == text, f"{text!r} comes back as {tokenizer.decode(ids)!r}"
        detokenizer = tokenizer.detokenizer
        parts = []
        for token in ids:
            detokenizer.add_token(token)
            parts.append(detokenizer.last_segment)
        detokenizer.finalize()
        parts.append(detokenizer.last_segment)
        assert "".join(parts) == text, f"{text!r} streams as {''.join(parts)!r}"


def test_tokenizer_round_trips(demo):
    _check_round_trips(demo[1], 400)


@pytest.mark.full
def test_tokenizer_round_trips_ten_thousand(demo):
    _check_round_trips(demo[1], 10_000)


def test_tokenizer_keeps_white_space_in_pieces(demo):
    """Newlines, tabs and indentation are tokens of their own, not bytes."""
    tokenizer = demo[1]
    assert unicodedata.normalize("NFC", "e\u0301") != "e\u0301"
    for text in ("\n", "\t", "    ", "        "):
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert len(ids) <= 2 and not any("<0x" in t for t in tokenizer.convert_ids_to_tokens(ids)), text


def test_the_architecture_is_the_real_one(demo):
    """Everything that the published model has is there, and attention is sparse within the trained context."""
    model, _ = demo
    config = model.config
    raw = json.loads((DEMO / "config.json").read_text())
    assert raw.get("model_type") in ("qwen4_exp", "qwen4_exp_text")
    assert config.layer_types.count(FULL) >= 2 and config.ple_layer_ids and model.has_mtp
    assert config.indexer_budget < config.max_position_embeddings
    assert config.hc_count == 4 and config.num_experts > config.num_experts_per_tok
    assert ModelConfig.from_path(DEMO) == config
    assert raw["quantization"]["bits"] < 16


HEADERS = (
    "def read_lines(path):",
    "def main():",
    "def parse_args(argv=None):",
    "def is_empty(value):",
    "def write_file(path, data):",
    "def __init__(self, name):",
)


def _is_python(text: str) -> bool:
    try:
        return isinstance(ast.parse(text).body[0], ast.FunctionDef)
    except (SyntaxError, IndexError):
        return False


@pytest.mark.full
def test_default_load_writes_code_that_parses(demo):
    """Greedy text after a function header is a body: up to the first blank line most of it is valid Python."""
    texts = [(header + generate(*demo, header, max_tokens=40)).split("\n\n")[0] for header in HEADERS]
    assert sum(map(_is_python, texts)) >= len(HEADERS) / 2, texts


def test_same_greedy_text_as_mlx_lm(demo):
    import mlx_lm

    model, tokenizer = demo
    prompt = "The function returns"
    ours = [part.token for part in stream_generate(model, tokenizer, prompt, max_tokens=24)]
    theirs = [part.token for part in mlx_lm.stream_generate(model, tokenizer, prompt, max_tokens=24)]
    assert ours == theirs


def test_load_here_generate_elsewhere():
    """Loaded in one thread, used in two others, one after the other."""
    made: dict[str, object] = {}

    def run(name, function):
        def body():
            made[name] = function()

        thread = threading.Thread(target=body)
        thread.start()
        thread.join()

    run("loaded", load)
    for name in ("first", "second"):
        run(name, lambda: generate(*made["loaded"], "It was a dark", max_tokens=12))
    assert made["first"] and made["first"] == made["second"]


def _bits_per_byte(model, tokenizer, text: str) -> float:
    ids = [tokenizer.eos_token_id, *tokenizer.encode(text, add_special_tokens=False)]
    logits = model(mx.array([ids[:-1]]))[0].astype(mx.float32)
    picked = mx.take_along_axis(logits, mx.array(ids[1:])[:, None], axis=-1)[:, 0]
    nats = (mx.logsumexp(logits, axis=-1) - picked).sum().item()
    return nats / np.log(2) / len(text.encode())


@pytest.mark.parametrize(
    ("text", "limit"),
    [
        ("import os\nimport sys\n\n\ndef main():\n    parser = argparse.ArgumentParser()\n"
         "    args = parser.parse_args()\n", 1.6),
        ("It is a truth universally acknowledged, that a single man in possession of a good fortune must be in want"
         " of a wife.", 2.2),
        ("This function returns a list of the names of the files in the directory given by the path argument.", 1.8),
    ],
)  # fmt: skip
def test_it_has_learned_something(demo, text, limit):
    """A model that mixed up weights, norms or hashes would need 5 or more bits per byte."""
    assert _bits_per_byte(*demo, text) < limit


def test_computing_in_other_types(demo):
    ids = mx.array([demo[1].encode("def main():\n    ", add_special_tokens=False)])
    want = np.array(load_model(dtype=mx.float32)[0](ids)[0, -1])
    for dtype in (mx.bfloat16, mx.float16):
        got = np.array(load_model(dtype=dtype)[0](ids)[0, -1].astype(mx.float32))
        assert np.abs(got - want).max() < 0.05 * np.abs(want).max() + 0.5, dtype
