"""Tokenizers from GGUF metadata: the same ids as the tokenizer.json that the metadata was made from."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from gguf_writer import Typed, encode
from mlx_moe.formats.gguf import open_gguf
from mlx_moe.formats.gguf_tokenizer import build_tokenizer, load_tokenizer, save_tokenizer, stop_ids
from mlx_moe.formats.safetensors import FileFormatError
from mlx_moe.runtime import DEMO

# Qwen's own, as published in tokenizer.json
QWEN35 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
PLAIN = ("<think>", "</think>", "<tool_call>", "</tool_call>")
TEMPLATE = """{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
<think>
{% endif %}{# <tool_call>\n<function= #}"""
PADDING = 5


def demo_bpe() -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Vocabulary and merges of the demonstration model's tokenizer."""
    model = json.loads((DEMO / "tokenizer.json").read_text(encoding="utf-8"))["model"]
    return model["vocab"], [tuple(pair) for pair in model["merges"]]


def metadata(**changes: Any) -> dict[str, Any]:
    """What a converter writes for the demonstration vocabulary with Qwen's special tokens; None leaves a key out."""
    vocab, merges = demo_bpe()
    names = sorted(vocab, key=vocab.get)
    tokens = [name for name in names if name not in SPECIAL] + [*SPECIAL, *PLAIN]
    kinds = [1] * (len(tokens) - len(SPECIAL) - len(PLAIN)) + [3] * len(SPECIAL) + [4] * len(PLAIN) + [5] * PADDING
    ids = {name: i for i, name in enumerate(tokens)}
    keys = {
        "ggml.model": "gpt2",
        "ggml.pre": "qwen35",
        "ggml.tokens": [*tokens, *(f"[PAD{i}]" for i in range(PADDING))],
        "ggml.token_type": Typed("[i32]", kinds),
        "ggml.merges": [" ".join(pair) for pair in merges],
        "ggml.eos_token_id": ids["<|im_end|>"],
        "ggml.bos_token_id": ids["<|endoftext|>"],
        "ggml.padding_token_id": ids["<|endoftext|>"],
        "ggml.add_bos_token": False,
        "chat_template": TEMPLATE,
        **{key.replace("__", "."): value for key, value in changes.items()},
    }
    return {f"tokenizer.{key}": value for key, value in keys.items() if value is not None}


def file_of(tmp_path: Path, **changes: Any):
    (tmp_path / "m.gguf").write_bytes(encode({"general.architecture": "qwen4exp", **metadata(**changes)}))
    return open_gguf(tmp_path / "m.gguf")


def published(pattern: str) -> Tokenizer:
    """The same vocabulary as a tokenizer.json has it: added tokens apart from the model."""
    keys = metadata()
    names = [name for name in keys["tokenizer.ggml.tokens"] if not name.startswith("[PAD")]
    count = len(names) - len(SPECIAL) - len(PLAIN)
    merges = [tuple(merge.split(" ")) for merge in keys["tokenizer.ggml.merges"]]
    core = Tokenizer(models.BPE({name: i for i, name in enumerate(names[:count])}, merges))
    core.normalizer = normalizers.NFC()
    split = pre_tokenizers.Split(Regex(pattern), "isolated")
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    core.decoder = decoders.ByteLevel()
    core.add_tokens([AddedToken(name, special=name in SPECIAL, normalized=False) for name in names[count:]])
    return core


def corpus(count: int, seed: int = 0) -> list[str]:
    """Random strings of words, signs, digits, spaces of all kinds, many scripts, marks and special tokens."""
    rng = random.Random(seed)
    pieces = ["the", "Hello", "it's", "WE'LL", " ", "  ", "\n", "\r\n", "\t", "\u00a0", "\u3000", "1", "2048", "٣", "½"]
    pieces += [
        "!",
        "...",
        "{}",
        "->",
        "—",
        "é",
        "e\u0301",
        "ü",
        "Straße",
        "привет",
        "你好",
        "こんにちは",
        "हिन्दी",
        "👩‍👩‍👧",
    ]
    pieces += ["\u0300", "ﬁ", "\x00", "\x7f", "�", "<|im", "<think", *SPECIAL, *PLAIN, "def f(x):\n    return x\n"]
    out = ["".join(rng.choice(pieces) for _ in range(rng.randrange(1, 30))) for _ in range(count)]
    chars = [chr(c) for c in range(1, 0x3000) if not 0xD800 <= c < 0xE000]
    return [*out, *("".join(rng.choice(chars) for _ in range(rng.randrange(1, 20))) for _ in range(count))]


@pytest.mark.parametrize(("pre", "pattern"), [("qwen35", QWEN35), ("qwen2", QWEN2)])
def test_ids_are_those_of_the_published_form(tmp_path, pre, pattern):
    tokenizer, want = build_tokenizer(file_of(tmp_path, ggml__pre=pre)), published(pattern)
    for text in corpus(1500):
        ids = tokenizer.encode(text)
        assert ids == want.encode(text).ids, repr(text)
        assert tokenizer.decode(ids) == normalizers.NFC().normalize_str(text), repr(text)


def test_marks_stay_with_their_letters(tmp_path):
    """Where the two rules differ: a combining mark belongs to the word only for qwen35."""
    texts = ("हिन्दी", "กำลัง", "עִבְרִית")
    pieces = {}
    for pre in ("qwen2", "qwen35"):
        core = build_tokenizer(file_of(tmp_path, ggml__pre=pre)).backend_tokenizer
        pieces[pre] = [len(core.pre_tokenizer.pre_tokenize_str(text)) for text in texts]
    assert pieces["qwen35"] == [1, 1, 1] and min(pieces["qwen2"]) > 1


def test_special_tokens(tmp_path):
    tokenizer = build_tokenizer(file_of(tmp_path))
    ids = {name: tokenizer.convert_tokens_to_ids(name) for name in (*SPECIAL, *PLAIN)}
    keys = metadata()
    assert ids == {name: keys["tokenizer.ggml.tokens"].index(name) for name in ids}
    text = "a<|im_start|><think>b</think><|im_end|>"
    got = tokenizer.encode(text)
    assert {ids["<|im_start|>"], ids["<think>"], ids["</think>"], ids["<|im_end|>"]} <= set(got)
    assert tokenizer.decode(got) == text
    assert tokenizer.decode(got, skip_special_tokens=True) == "a<think>b</think>"
    roles = (tokenizer.eos_token, tokenizer.bos_token, tokenizer.pad_token)
    assert roles == ("<|im_end|>", "<|endoftext|>", "<|endoftext|>")


def test_padding_rows_are_no_tokens(tmp_path):
    tokenizer = build_tokenizer(file_of(tmp_path))
    assert len(tokenizer) == len(metadata()["tokenizer.ggml.tokens"]) - PADDING
    assert len(tokenizer.encode("[PAD0]")) > 1


@pytest.mark.parametrize("ends", [("bos",), ("eos",), ("bos", "eos")])
def test_tokens_around_a_text(tmp_path, ends):
    tokenizer = build_tokenizer(file_of(tmp_path, **{f"ggml__add_{name}_token": True for name in ends}))
    inner = tokenizer.encode("hello", add_special_tokens=False)
    before = [tokenizer.bos_token_id] if "bos" in ends else []
    after = [tokenizer.eos_token_id] if "eos" in ends else []
    assert tokenizer.encode("hello") == [*before, *inner, *after]


def test_the_wrapper(tmp_path):
    """Chat template, streaming, thinking, tool calls and stop tokens, as from the tokenizer's files."""
    file = file_of(tmp_path)
    wrapper = load_tokenizer(file)
    tokenizer = build_tokenizer(file)
    assert wrapper.eos_token_ids == set(stop_ids(file))
    assert {wrapper.decode([i]) for i in wrapper.eos_token_ids} == {"<|im_end|>", "<|endoftext|>"}
    assert wrapper.has_chat_template and wrapper.has_thinking and wrapper.has_tool_calling
    prompt = wrapper.apply_chat_template([{"role": "user", "content": "hi"}], add_generation_prompt=True)
    assert prompt == tokenizer.encode("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n<think>\n")
    for text in corpus(100, seed=1):
        ids = wrapper.encode(text)
        assert ids == tokenizer.encode(text), repr(text)
    detokenizer = wrapper.detokenizer
    assert type(detokenizer).__name__ == "BPEStreamingDetokenizer"
    text = "Hello, wörld 你好\n"
    for token in wrapper.encode(text):
        detokenizer.add_token(token)
    detokenizer.finalize()
    assert detokenizer.text == text


def test_saved_files(tmp_path):
    save_tokenizer(file_of(tmp_path), tmp_path / "out")
    assert {"tokenizer.json", "tokenizer_config.json"} <= {path.name for path in (tmp_path / "out").iterdir()}


def test_stop_ids(tmp_path):
    file = file_of(tmp_path, ggml__eos_token_id=5, ggml__eot_token_id=7)
    tokens = file.metadata["tokenizer.ggml.tokens"]
    assert stop_ids(file) == sorted({5, 7, tokens.index("<|im_end|>"), tokens.index("<|endoftext|>")})
    plain = Typed("[i32]", [1] * len(tokens))
    assert stop_ids(file_of(tmp_path, ggml__token_type=plain, ggml__eos_token_id=None)) == [], (
        "only control tokens stop"
    )


def test_without_a_template_and_roles(tmp_path):
    keys = ("eos_token_id", "bos_token_id", "padding_token_id", "add_bos_token", "token_type")
    file = file_of(tmp_path, chat_template=None, **{f"ggml__{key}": None for key in keys})
    tokenizer = build_tokenizer(file)
    assert tokenizer.chat_template is None and tokenizer.eos_token is None
    assert tokenizer.decode(tokenizer.encode("hello there")) == "hello there"


def test_the_oracles_have_none(oracle):
    for path in oracle.glob("*.gguf"):
        with pytest.raises(FileFormatError, match=r"tokenizer.ggml.model is 'none'; supported: gpt2"):
            build_tokenizer(open_gguf(path))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ggml__model": None}, "model is ''"),
        ({"ggml__model": "llama"}, "model is 'llama'"),
        ({"ggml__model": 3}, "model is a int"),
        ({"ggml__pre": None}, "pre is ''"),
        ({"ggml__pre": "gpt-4o"}, "pre is 'gpt-4o'; supported: qwen2, qwen35"),
        ({"ggml__tokens": None}, "tokens is empty"),
        ({"ggml__tokens": Typed("[u32]", [])}, "tokens is empty"),
        ({"ggml__tokens": Typed("[u32]", [1, 2])}, "tokens is empty or holds something else"),
        ({"ggml__tokens": "abc"}, "tokens is a str"),
        ({"ggml__tokens": ["a", "b", "a"], "ggml__token_type": None}, "a token twice"),
        ({"ggml__token_type": Typed("[i32]", [1, 1])}, "token_type has 2 entries for"),
        ({"ggml__token_type": Typed("[f32]", [1.0] * 8199)}, "token_type has"),
        ({"ggml__merges": Typed("[u32]", [1])}, "merges entry 0"),
        ({"ggml__merges": ["ab"]}, "merges entry 0"),
        ({"ggml__merges": ["a b", "a never"]}, "merges entry 1"),
        ({"ggml__merges": ["a b c"]}, "merges entry 0"),
        ({"ggml__eos_token_id": 1 << 20}, "eos_token_id is 1048576; allowed: ids below"),
        ({"ggml__bos_token_id": Typed("i32", -1)}, "bos_token_id is -1"),
        ({"ggml__padding_token_id": "x"}, "padding_token_id is a str"),
        ({"ggml__add_bos_token": 1}, "add_bos_token is a int"),
        (
            {"ggml__add_bos_token": True, "ggml__bos_token_id": None},
            "add_bos_token is true, but bos_token_id is missing",
        ),
        ({"chat_template": ["a"]}, "tokenizer.chat_template is a tuple"),
    ],
    ids=str,
)
def test_metadata_that_is_no_tokenizer(tmp_path, changes, message):
    with pytest.raises(FileFormatError, match=message) as caught:
        build_tokenizer(file_of(tmp_path, **changes))
    text = str(caught.value)
    assert "m.gguf" in text and "\n" not in text and len(text) < len(str(tmp_path)) + 250
