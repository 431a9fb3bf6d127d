"""Where a model's usage and its static profile are kept, and reading and writing them.

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

from mlx_moe import twin_file
from mlx_moe.config import ModelConfig
from mlx_moe.environment import cache_folder
from mlx_moe.paging.index import ExpertIndex
from mlx_moe.paging.usage import Usage
from mlx_moe.paging.usage_file import decode, encode, fingerprint, most_bytes

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class UsageStore:
    """The files of one model.

    Attributes:
        paths: candidates for each kind, the preferred first; without any nothing is remembered.
        mark: the model's fingerprint.
        layers, experts: the most layers (with a draft layer), and experts per layer.
    """

    paths: dict[str, tuple[Path, ...]]
    mark: str
    layers: int
    experts: int

    @classmethod
    def of(cls, config: ModelConfig, index: ExpertIndex) -> UsageStore:
        """Of the model whose experts lie as ``index`` says. Raises OSError where its files are not there."""
        mark = fingerprint(config, index)
        paths = {kind: _candidates(index.files[0], kind, mark) for kind in ("usage", "profile")}
        return cls(paths, mark, config.num_hidden_layers + 1, config.num_experts)

    def find(self, kind: str) -> Path | None:
        """The file that would be read, whatever is in it: the one written last, since places may change."""
        there = [path for path in self.paths[kind] if os.path.lexists(path)]
        return max(there, key=lambda path: path.lstat().st_mtime, default=None)

    def read(self, kind: str) -> Usage | None:
        """What is remembered; None, with one warning, where the file is not one of this model's."""
        path = self.find(kind)
        if path is None:
            return None
        try:
            data = twin_file.read(path, self._most_bytes)
            if data is None:
                return None
            usage = decode(data, kind, self.experts, self.mark)
            if not self.layers - 1 <= len(usage.counts) <= self.layers:
                raise ValueError("it belongs to another model")
        except (OSError, ValueError) as error:
            reason = error.strerror or str(error) if isinstance(error, OSError) else str(error)
            remedy = "delete it" if kind == "profile" else "'mlx-moe usage --reset' with the model deletes it"
            logger.warning("%s is ignored: %s; %s", path, reason, remedy)
            return None
        return usage

    def write(self, kind: str, usage: Usage, out: Path | None = None) -> Path:
        """Save in place of what the file holds; returns where it is. out: instead of the model's own place.

        Raises OSError where no place can be written.
        """
        paths = self.paths[kind] if out is None else (out,)
        error: OSError = FileNotFoundError("there is no folder to write to; set XDG_CACHE_HOME")
        for path in paths:
            try:
                if out is None:
                    path.parent.mkdir(parents=True, exist_ok=True)
                twin_file.write(path, encode(kind, usage, self.mark), self._most_bytes)
            except OSError as failed:
                error = failed
            else:
                return path
        raise error

    @property
    def _most_bytes(self) -> int:
        return most_bytes(self.layers, self.experts)

    def saver(self) -> Callable[[Usage], None]:
        """Writes usage; where that cannot be done, says so once and leaves it."""
        failed = False

        def save(usage: Usage) -> None:
            nonlocal failed
            if failed:
                return
            try:
                self.write("usage", usage)
            except OSError as error:
                failed = True
                logger.warning("usage of experts is not remembered: %s", error)

        return save

    def reset(self) -> list[Path]:
        """Delete what was learned, wherever it is; returns what was there. A profile stays."""
        gone = [path for path in self.paths["usage"] if os.path.lexists(path)]
        for path in gone:
            path.unlink()
        return gone


def _candidates(weights: Path, kind: str, mark: str) -> tuple[Path, ...]:
    """Beside the weights, and in the cache folder; the first is the one that can be written."""
    cache = cache_folder()
    cached = () if cache is None else (cache / "usage" / f"{mark}.{kind}",)
    # A link to weights is the Hub's cache, whose folders are huggingface_hub's own; ours is the installed package.
    if weights.is_symlink() or Path(__file__).resolve().parent in weights.resolve().parents:
        return cached
    beside = weights.with_name(f"{weights.name}.{kind}" if weights.suffix == ".gguf" else f"mlx-moe.{kind}")
    return (beside, *cached) if os.access(beside.parent, os.W_OK) else (*cached, beside)
