"""The tokenizer of a model folder, through mlx-lm."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mlx_lm.tokenizer_utils import TokenizerWrapper
from mlx_lm.tokenizer_utils import load as mlx_lm_load

from mlx_moe.formats.safetensors import FileFormatError


def load_tokenizer(
    folder: str | Path, config: Mapping[str, Any], options: Mapping[str, Any] | None = None
) -> TokenizerWrapper:
    """mlx-lm's wrapper around the folder's tokenizer, with every stop token that the folder names.

    Args:
        config: raw contents of config.json.
        options: keywords for transformers' AutoTokenizer.

    Raises FileNotFoundError when there is no tokenizer, FileFormatError when it cannot be read.
    """
    folder = Path(folder)
    if not has_tokenizer(folder):
        raise FileNotFoundError(f"{folder}: holds no tokenizer.json; load_model works without a tokenizer")
    try:
        return mlx_lm_load(folder, dict(options or {}), eos_token_ids=stop_ids(folder, config))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise FileFormatError(f"{folder}: the tokenizer cannot be read ({_first_line(error)})") from None


def has_tokenizer(folder: Path) -> bool:
    """Whether a folder holds a tokenizer's files."""
    return (folder / "tokenizer.json").exists() or (folder / "vocab.json").exists()


def generation_config(folder: str | Path) -> dict[str, Any]:
    """The folder's generation_config.json, or nothing."""
    path = Path(folder) / "generation_config.json"
    if not path.exists():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise FileFormatError(f"{path}: cannot be read as JSON ({_first_line(error)})") from None
    return value if isinstance(value, dict) else {}


def stop_ids(folder: str | Path, config: Mapping[str, Any]) -> list[int]:
    """Ids that end a text: those of generation_config.json and of config.json together."""
    text = config.get("text_config") or {}
    ids: list[int] = []
    for value in (generation_config(folder).get("eos_token_id"), config.get("eos_token_id"), text.get("eos_token_id")):
        ids += value if isinstance(value, list) else [] if value is None else [value]
    if odd := [item for item in ids if not isinstance(item, int)]:
        raise FileFormatError(f"{folder}: eos_token_id holds {str(odd[0])[:40]!r}; allowed: token ids")
    return sorted(set(ids))


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
