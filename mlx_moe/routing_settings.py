"""Cache-aware routing as a model wants it: its own settings, which whoever measured it wrote beside it.

A bonus is added to logits, and how far those spread differs from model to model, so that one number cannot suit all.
``generation_config.json`` of a folder or pack may hold ``"moce": {"bonus": …, "keep_top": …, "max_rank": …}``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from mlx_moe.formats.safetensors import FileFormatError
from mlx_moe.formats.tokenizer import generation_config
from mlx_moe.paging.moce import MoceConfig

Moce = MoceConfig | Mapping[str, Any] | bool | None
"""What a user asks for: settings, changes to the model's own, whether to use those, or the plain router."""


def moce_settings(source: Path, asked: Moce) -> MoceConfig | None:
    """What to route with; None is the plain router.

    Args:
        source: a model's folder, or a GGUF file, which has no settings of its own.
        asked: see Moce.

    Raises ValueError for settings out of range, FileFormatError naming the file where the model's own are.
    """
    if isinstance(asked, MoceConfig) or asked is None or asked is False:
        return asked or None
    if asked is not True and not isinstance(asked, Mapping):
        raise ValueError(f"moce is {asked!r}; needed: a MoceConfig, True, or None")
    return _changed(_own(source), {} if asked is True else asked)


def _own(source: Path) -> MoceConfig:
    own = generation_config(source).get("moce", {}) if source.is_dir() else {}
    path = source / "generation_config.json"
    if not isinstance(own, dict):
        raise FileFormatError(f"{path}: moce is {str(own)[:40]!r}; allowed: settings by name")
    try:
        return _changed(MoceConfig(), own)
    except ValueError as error:
        raise FileFormatError(f"{path}: {error}") from None


def _changed(settings: MoceConfig, changes: Mapping[str, Any]) -> MoceConfig:
    names = [field.name for field in fields(MoceConfig)]
    if unknown := [name for name in changes if name not in names]:
        raise ValueError(f"moce has no setting {unknown[0]!r}; allowed: {', '.join(names)}")
    return replace(settings, **changes)
