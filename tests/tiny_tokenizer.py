"""A byte-level BPE tokenizer of 128 tokens for the tiny checkpoints, in files as published models have them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from checkpoints import tiny_config
from gguf_writer import Typed

MERGES = """th he in er an re on at en nd ti es or te of ed is it al ar st to nt""".split()  # noqa: SIM905
SPECIAL = ("<think>", "</think>", "<|im_start|>", "<|im_end|>", "<|a|>", "<|b|>", "<|c|>", "<|endoftext|>")
THINK, END_THINK, IM_START, IM_END, ENDOFTEXT = 120, 121, 122, 123, 127

TEMPLATE = """\
{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking %}<think>{% endif %}{% if greeting is defined %}{{ greeting }}{% endif %}{% endif %}"""
"""Whole turns as they are; ``enable_thinking`` opens a block (mlx-lm sets it by default), ``greeting`` adds a text."""


def short_config(**changes: Any) -> dict[str, Any]:
    """A configuration of two layers, one of each kind, for tests that generate much."""
    return tiny_config(
        **{
            "num_hidden_layers": 2,
            "layer_types": ["linear_attention", "full_attention"],
            "ple_layer_ids": [1],
            **changes,
        }
    )


def tiny_tokenizer(template: str | None = None, bos: bool = False) -> PreTrainedTokenizerFast:
    """Ids 0-96 are line feed, tab and printable ASCII, 97-119 pairs of letters, 120-127 special tokens."""
    alphabet = ["\u010a", "\u0109", "\u0120", *map(chr, range(33, 127))]  # byte-level names of \n, \t and space
    vocab = {token: i for i, token in enumerate([*alphabet, *MERGES])}
    core = Tokenizer(models.BPE(vocab, [tuple(pair) for pair in MERGES]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    assert core.get_vocab_size() == 128
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        eos_token="<|im_end|>",
        bos_token="<|endoftext|>" if bos else None,
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = template
    return tokenizer


def save_tokenizer(folder: Path, template: str | None = None, bos: bool = False) -> Path:
    """Write the tokenizer's files into a model folder; with ``bos`` it starts every text with <|endoftext|>."""
    tokenizer = tiny_tokenizer(template, bos)
    tokenizer.save_pretrained(str(folder))
    if bos:
        path = folder / "tokenizer.json"
        content = json.loads(path.read_text())
        piece = {"SpecialToken": {"id": "<|endoftext|>", "type_id": 0}}
        content["post_processor"] = {
            "type": "TemplateProcessing",
            "single": [piece, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [piece, {"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
            "special_tokens": {
                "<|endoftext|>": {"id": "<|endoftext|>", "ids": [ENDOFTEXT], "tokens": ["<|endoftext|>"]}
            },
        }
        path.write_text(json.dumps(content))
    return folder


def gguf_keys(template: str | None = None) -> dict[str, Any]:
    """The same tokenizer as the metadata of a GGUF file; words are split as Qwen's are."""
    vocab = tiny_tokenizer().get_vocab()
    keys = {
        "ggml.model": "gpt2",
        "ggml.pre": "qwen35",
        "ggml.tokens": sorted(vocab, key=vocab.get),
        "ggml.token_type": Typed("[i32]", [1] * (len(vocab) - len(SPECIAL)) + [3] * len(SPECIAL)),
        "ggml.merges": [" ".join(merge) for merge in MERGES],
        "ggml.eos_token_id": IM_END,
        **({"chat_template": template} if template else {}),
    }
    return {f"tokenizer.{key}": value for key, value in keys.items()}
