"""The files of a model folder that are neither weights nor config.json, and go into a pack as they are."""

from __future__ import annotations

import shutil
from pathlib import Path

_PATTERNS = (
    "generation_config.json", "tokenizer*.json", "special_tokens_map.json", "added_tokens.json", "vocab.json",
    "merges.txt", "vocab.txt", "tokenizer.model", "*.tiktoken", "*.jinja",
)  # fmt: skip


def copy_tokenizer(source: Path, target: Path) -> bool:
    """Copy the tokenizer's and the template's files; whether there is a tokenizer among them."""
    paths = sorted({path for pattern in _PATTERNS for path in source.glob(pattern) if not path.name.startswith(".")})
    for path in paths:
        shutil.copyfile(path, target / path.name)
    return any(path.name in ("tokenizer.json", "vocab.json", "tokenizer.model") for path in paths)
