"""Sampling settings for conversations: the folder's own, else the model card's."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from mlx_moe.formats.safetensors import FileFormatError
from mlx_moe.formats.tokenizer import generation_config


@dataclass(frozen=True)
class Sampling:
    """Arguments of mlx-lm's make_sampler."""

    temp: float
    top_p: float
    top_k: int


THINKING = Sampling(temp=1.0, top_p=0.95, top_k=20)
ANSWERING = Sampling(temp=0.7, top_p=0.8, top_k=20)
"""The model card's settings with and without a thinking block."""


def chat_sampling(folder: str | Path, thinking: bool) -> Sampling:
    """What a chat starts with: the model card's settings, overridden by generation_config.json when that samples."""
    card = THINKING if thinking else ANSWERING
    own = generation_config(folder)
    if not own.get("do_sample", any(key in own for key in ("temperature", "top_p", "top_k"))):
        return card
    values = {}
    for name, default in (("temperature", card.temp), ("top_p", card.top_p), ("top_k", card.top_k)):
        value = default if own.get(name) is None else own[name]
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            path = Path(folder) / "generation_config.json"
            raise FileFormatError(f"{path}: {name} is {str(value)[:40]!r}; allowed: a number")
        values[name] = value
    return Sampling(float(values["temperature"]), float(values["top_p"]), int(values["top_k"]))
