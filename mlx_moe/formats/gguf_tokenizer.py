"""The tokenizer that a GGUF file carries in its metadata: byte-level BPE with Qwen's splitting of words.

The vocabulary is in the file, the rules are not: ``tokenizer.ggml.pre`` names them, and they are those of the published
tokenizer.json (text is brought to NFC first, then split by a regular expression, then into bytes).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mlx_lm.tokenizer_utils import TokenizerWrapper
from mlx_lm.tokenizer_utils import load as mlx_lm_load
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from mlx_moe.formats.gguf import GgufFile
from mlx_moe.formats.safetensors import FileFormatError
from mlx_moe.scratch import scratch_folder

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED = 1, 2, 3, 4, 5
"""tokenizer.ggml.token_type"""
_WORDS = {
    "qwen2": r"\p{L}",
    "qwen35": r"\p{L}\p{M}",
}
"""tokenizer.ggml.pre: the classes of characters that words are made of."""
_STOPS = ("<|im_end|>", "<|endoftext|>")


def build_tokenizer(file: GgufFile) -> PreTrainedTokenizerFast:
    """The tokenizer and chat template of a file, with the ids that the file gives.

    Raises FileFormatError, in one line that names the key, when there is none or it is not of a known kind.
    """
    tokens, types = _vocabulary(file)
    used = len(tokens)
    while used and types[used - 1] == UNUSED:  # rows that only pad the embedding
        used -= 1
    tokens = tokens[:used]
    vocab = {token: i for i, token in enumerate(tokens)}
    if len(vocab) < used:
        raise _error(file, "tokens", "holds a token twice; needed: different tokens")
    core = Tokenizer(models.BPE(vocab, _merges(file, vocab), fuse_unk=False, byte_fallback=False))
    core.normalizer = normalizers.NFC()
    core.pre_tokenizer = _splitting(file)
    core.decoder = decoders.ByteLevel()
    core.add_tokens([_added(tokens[i], types[i]) for i in range(used) if types[i] in (UNKNOWN, CONTROL, USER_DEFINED)])
    core.post_processor = _post_processor(file, tokens)
    names = {f"{name}_token": _token(file, tokens, key) for name, key in _named_ids(file).items()}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, clean_up_tokenization_spaces=False, **names)
    tokenizer.chat_template = _get(file, "chat_template", str, None, prefix="tokenizer")
    return tokenizer


def save_tokenizer(file: GgufFile, folder: str | Path) -> None:
    """Write the tokenizer's files (tokenizer.json and its configuration, with the chat template) into a folder."""
    build_tokenizer(file).save_pretrained(str(folder))


def load_tokenizer(file: GgufFile, options: Mapping[str, Any] | None = None) -> TokenizerWrapper:
    """mlx-lm's wrapper around the file's tokenizer, with every stop token that the file names.

    It goes through the tokenizer's files in a temporary folder, so that everything that mlx-lm finds out from files
    (how to stream text, the parser of tool calls, thinking) is found out here too.

    Args:
        options: keywords for transformers' AutoTokenizer.
    """
    with scratch_folder("tokenizer") as folder:
        save_tokenizer(file, folder)
        return mlx_lm_load(folder, dict(options or {}), eos_token_ids=stop_ids(file))


def stop_ids(file: GgufFile) -> list[int]:
    """Ids that end a text: those that the file names, and Qwen's two by their text."""
    tokens, types = _vocabulary(file)
    ids = {i for i, token in enumerate(tokens) if types[i] == CONTROL and token in _STOPS}
    for key in ("eos_token_id", "eot_token_id"):
        if (value := _id(file, tokens, key)) is not None:
            ids.add(value)
    return sorted(ids)


def _error(file: GgufFile, key: str, reason: str, prefix: str = "tokenizer.ggml") -> FileFormatError:
    return FileFormatError(f"{file.paths[0]}: {prefix}.{key} {reason}, or put tokenizer.json beside the file")


def _get(file: GgufFile, key: str, kind: type, default: Any, prefix: str = "tokenizer.ggml") -> Any:
    value = file.metadata.get(f"{prefix}.{key}", default)
    if value is not default and type(value) is not kind:
        raise _error(file, key, f"is a {type(value).__name__}; needed: a {kind.__name__}", prefix)
    return value


def _vocabulary(file: GgufFile) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Tokens and their types, by id."""
    model = _get(file, "model", str, "")
    if model != "gpt2":
        raise _error(file, "model", f"is {model[:40]!r}; supported: gpt2 (byte-level BPE)")
    tokens = _get(file, "tokens", tuple, ())
    types = _get(file, "token_type", tuple, (NORMAL,) * len(tokens))
    if not tokens or not all(type(token) is str for token in tokens):
        raise _error(file, "tokens", "is empty or holds something else; needed: strings")
    if len(types) != len(tokens) or not all(type(number) is int for number in types):
        raise _error(file, "token_type", f"has {len(types)} entries for {len(tokens)} tokens; needed: one number each")
    return tokens, types


def _merges(file: GgufFile, vocab: Mapping[str, int]) -> list[tuple[str, str]]:
    """Pairs of tokens, the first to be joined first. No token of the byte alphabet has a space in it."""
    merges = _get(file, "merges", tuple, ())
    out = []
    for i, merge in enumerate(merges):
        left, space, right = merge.partition(" ") if type(merge) is str else ("", "", "")
        if not space or left not in vocab or right not in vocab or left + right not in vocab:
            raise _error(
                file, "merges", f"entry {i} ({str(merge)[:40]!r}) does not fit the tokens; needed: two of them"
            )
        out.append((left, right))
    return out


def _splitting(file: GgufFile) -> pre_tokenizers.PreTokenizer:
    """Words with the space or sign before them, single digits, signs, and runs of spaces; then bytes."""
    pre = _get(file, "pre", str, "")
    if pre not in _WORDS:
        raise _error(file, "pre", f"is {pre[:40]!r}; supported: {', '.join(_WORDS)}")
    letters = _WORDS[pre]
    pattern = "|".join(
        (
            r"(?i:'s|'t|'re|'ve|'m|'ll|'d)",
            rf"[^\r\n\p{{L}}\p{{N}}]?[{letters}]+",
            r"\p{N}",
            rf" ?[^\s{letters}\p{{N}}]+[\r\n]*",
            r"\s*[\r\n]+",
            r"\s+(?!\S)",
            r"\s+",
        )
    )
    words = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    return pre_tokenizers.Sequence([words, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def _added(token: str, kind: int) -> AddedToken:
    """A token that is cut out of a text before anything else; what is special can be left out when decoding."""
    return AddedToken(token, special=kind != USER_DEFINED, normalized=False)


def _post_processor(file: GgufFile, tokens: tuple[str, ...]) -> processors.PostProcessor:
    """What stands before and after every text: nothing, unless the file says so."""
    ends = {}
    for name in ("bos", "eos"):
        wanted = _get(file, f"add_{name}_token", bool, False)
        ends[name] = _token(file, tokens, f"{name}_token_id") if wanted else None
        if wanted and ends[name] is None:
            raise _error(file, f"add_{name}_token", f"is true, but {name}_token_id is missing; needed: both")
    if not any(ends.values()):
        return processors.ByteLevel(trim_offsets=False)
    single = [piece for piece in (ends["bos"], "$A", ends["eos"]) if piece is not None]
    special = [(token, tokens.index(token)) for token in set(ends.values()) - {None}]
    return processors.TemplateProcessing(single=single, pair=[*single, "$B:1"], special_tokens=special)


def _named_ids(file: GgufFile) -> dict[str, str]:
    """Which of the tokens with a role the file names, and their keys."""
    keys = {"eos": "eos_token_id", "bos": "bos_token_id", "pad": "padding_token_id"}
    return {name: key for name, key in keys.items() if f"tokenizer.ggml.{key}" in file.metadata}


def _id(file: GgufFile, tokens: tuple[str, ...], key: str) -> int | None:
    value = _get(file, key, int, None)
    if value is not None and not 0 <= value < len(tokens):
        raise _error(file, key, f"is {value}; allowed: ids below {len(tokens)}")
    return value


def _token(file: GgufFile, tokens: tuple[str, ...], key: str) -> str | None:
    value = _id(file, tokens, key)
    return None if value is None else tokens[value]
