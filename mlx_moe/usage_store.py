"""Where a model's usage, what is remembered by token, and its static profile are kept; reading and writing them.

Beside the model where its folder is the user's own and can be written, else in the user's cache folder. What is read is
not trusted: a file that is damaged, foreign or too large counts as none, with one warning. What is written appears
whole or not at all (``twin_file.py``), so of several processes the last wins, and none sees half a file.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from mlx_moe import twin_file
from mlx_moe.config import ModelConfig
from mlx_moe.environment import cache_folder
from mlx_moe.paging.index import ExpertIndex
from mlx_moe.paging.token_memory import TokenMemory
from mlx_moe.paging.usage import Usage
from mlx_moe.paging.usage_file import decode, encode, fingerprint, most_bytes

logger = logging.getLogger(__name__)
T = TypeVar("T")

TOKENS = "tokens"
LEARNED = ("usage", TOKENS)
"""Kinds of files that runs write; a profile is written by hand."""


@dataclass(frozen=True)
class UsageStore:
    """The files of one model.

    Attributes:
        paths: candidates for each kind, the preferred first; without any nothing is remembered.
        mark: the model's fingerprint.
        layers, experts: the most layers (with a draft layer), and experts per layer.
        top_k: experts that a token uses.
    """

    paths: dict[str, tuple[Path, ...]]
    mark: str
    layers: int
    experts: int
    top_k: int

    @classmethod
    def of(cls, config: ModelConfig, index: ExpertIndex) -> UsageStore:
        """Of the model whose experts lie as ``index`` says. Raises OSError where its files are not there."""
        mark = fingerprint(config, index)
        paths = {kind: _candidates(index.files[0], kind, mark) for kind in (*LEARNED, "profile")}
        return cls(paths, mark, config.num_hidden_layers + 1, config.num_experts, config.num_experts_per_tok)

    @property
    def trunk(self) -> int:
        """Layers without a draft layer."""
        return self.layers - 1

    def find(self, kind: str) -> Path | None:
        """The file that would be read, whatever is in it: the one written last, since places may change."""
        there = [path for path in self.paths[kind] if os.path.lexists(path)]
        return max(there, key=lambda path: path.lstat().st_mtime, default=None)

    def read(self, kind: str) -> Usage | None:
        """Usage or profile; None, with one warning, where the file is not one of this model's."""

        def parse(data: bytes) -> Usage:
            usage = decode(data, kind, self.experts, self.mark)
            if not self.trunk <= len(usage.counts) <= self.layers:
                raise ValueError("it belongs to another model")
            return usage

        return self._read(kind, parse)

    def read_tokens(self) -> TokenMemory | None:
        """What is remembered by token; as ``read``."""
        return self._read(
            TOKENS, lambda data: TokenMemory.decode(data, self.trunk, self.experts, self.top_k, self.mark)
        )

    def write(self, kind: str, usage: Usage, out: Path | None = None) -> Path:
        """Save in place of what the file holds; returns where it is. out: instead of the model's own place.

        Raises OSError where no place can be written.
        """
        return self._write(kind, encode(kind, usage, self.mark), out)

    def write_tokens(self, memory: TokenMemory) -> Path:
        """As ``write``."""
        return self._write(TOKENS, memory.encode(self.mark))

    def savers(self) -> tuple[Callable[[Usage], None], Callable[[TokenMemory], None]]:
        """Write usage and what is remembered by token; where that cannot be done, they say so once and leave it."""
        failed = False

        def saving(write: Callable[..., Path], *what: Any) -> None:
            nonlocal failed
            if failed:
                return
            try:
                write(*what)
            except OSError as error:
                failed = True
                logger.warning("usage of experts is not remembered: %s", error)

        return lambda usage: saving(self.write, "usage", usage), lambda memory: saving(self.write_tokens, memory)

    def reset(self) -> list[Path]:
        """Delete what was learned, wherever it is; returns what was there. A profile stays."""
        gone = [path for kind in LEARNED for path in self.paths[kind] if os.path.lexists(path)]
        for path in gone:
            path.unlink()
        return gone

    def _most_bytes(self, kind: str) -> int:
        if kind == TOKENS:
            return TokenMemory.most_bytes(self.trunk, self.experts, self.top_k)
        return most_bytes(self.layers, self.experts)

    def _read(self, kind: str, parse: Callable[[bytes], T]) -> T | None:
        path = self.find(kind)
        if path is None:
            return None
        try:
            data = twin_file.read(path, self._most_bytes(kind))
            return None if data is None else parse(data)
        except (OSError, ValueError) as error:
            reason = error.strerror or str(error) if isinstance(error, OSError) else str(error)
            remedy = "delete it" if kind == "profile" else "'mlx-moe usage --reset' with the model deletes it"
            logger.warning("%s is ignored: %s; %s", path, reason, remedy)
            return None

    def _write(self, kind: str, data: bytes, out: Path | None = None) -> Path:
        paths = self.paths[kind] if out is None else (out,)
        error: OSError = FileNotFoundError("there is no folder to write to; set XDG_CACHE_HOME")
        for path in paths:
            try:
                if out is None:
                    path.parent.mkdir(parents=True, exist_ok=True)
                twin_file.write(path, data, self._most_bytes(kind))
            except OSError as failed:
                error = failed
            else:
                return path
        raise error


def _candidates(weights: Path, kind: str, mark: str) -> tuple[Path, ...]:
    """Beside the weights, and in the cache folder; the first is the one that can be written."""
    cache = cache_folder()
    cached = () if cache is None else (cache / "usage" / f"{mark}.{kind}",)
    # A link to weights is the Hub's cache, whose folders are huggingface_hub's own; ours is the installed package.
    if weights.is_symlink() or Path(__file__).resolve().parent in weights.resolve().parents:
        return cached
    beside = weights.with_name(f"{weights.name}.{kind}" if weights.suffix == ".gguf" else f"mlx-moe.{kind}")
    return (beside, *cached) if os.access(beside.parent, os.W_OK) else (*cached, beside)
