"""Records what routers say while a model runs (``trace.py`` is the file).

In windows nothing is fetched before the pass after the next one begins: logits are computed with the ids in any case,
so that recording waits for no work of its own. Of prompts each layer goes to the file before the next one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import mlx.core as mx
import numpy as np

from mlx_moe.paging.ranks import ranked
from mlx_moe.paging.trace import LayerRouting, Ranked, Residency, TraceHeader, TraceWriter


@dataclass
class _Pass:
    """A pass whose logits [T, E] float32 are the device's still."""

    batch: int
    tokens: int
    prompt: bool = False
    accepted: int | None = None  # all, if nothing else is said
    routed: dict[int, mx.array] = field(default_factory=dict)  # by layer
    guessed: dict[int, list[mx.array]] = field(default_factory=dict)


class RoutingRecorder:
    """Takes what an expert source sees, and writes a recording."""

    def __init__(
        self, writer: TraceWriter, header: TraceHeader, residency: Callable[[], Residency | None] = lambda: None
    ) -> None:
        """residency: says what stands in memory when a pass begins; None where nothing streams."""
        self._writer, self._header, self._residency = writer, header, residency
        self._moved = True  # residency is not what the passes made it
        self._done: _Pass | None = None  # kept, not written
        self._now: _Pass | None = None

    def begin(self, batch: int, tokens: int) -> None:
        """A pass over [batch, tokens] starts, and the one before it is kept."""
        done, self._done, self._now = self._done, self._now, None
        self._write(done)
        if self._moved:
            self._flush()  # what led up to it comes first
            if (found := self._residency()) is not None:
                self._writer.residency(found)
            self._moved = False
        self._now = _Pass(batch, tokens)

    def routed(self, layer: int, logits: mx.array, prompt: bool) -> None:
        """A layer's router said ``logits`` [batch * tokens, E] float32."""
        if self._now is None:
            return
        if prompt and self._now.routed:  # the layer before has been waited for
            self._flush()
            self._writer.layers(self._taken(self._now))
        self._now.prompt = prompt
        self._now.routed[layer] = logits

    def guessed(self, layer: int, logits: mx.array) -> None:
        """It said ``logits`` [n, E] of rows of the layer before, those of the pass in their order."""
        if self._now is not None:
            self._now.guessed.setdefault(layer, []).append(logits)

    def commit(self, accepted: int) -> None:
        """Of the pass the first ``accepted`` tokens are kept."""
        if self._now is not None and self._now.accepted is None:
            self._now.accepted = min(accepted, self._now.tokens)

    def interrupted(self) -> None:
        """The pass ended in an error: it never was."""
        self._now, self._moved = None, True

    def moved(self) -> None:
        """Between passes something else changes what stands in memory."""
        self._moved = True

    def close(self) -> None:
        """Write what is there and end the file; may be called again."""
        self._flush()
        done, self._now = self._now, None
        self._write(done)
        self._writer.close()

    def _flush(self) -> None:
        done, self._done = self._done, None
        self._write(done)

    def _write(self, done: _Pass | None) -> None:
        if done is not None and (done.routed or done.prompt):
            self._writer.layers(self._taken(done))
            accepted = done.tokens if done.accepted is None else done.accepted
            self._writer.commit(done.prompt, done.batch, done.tokens, accepted)

    def _taken(self, found: _Pass) -> list[LayerRouting]:
        """Layers whose routers have been asked; they are gone then. Guesses count where every row has one."""
        names, words = sorted(found.routed), []
        for layer in names:
            early = found.guessed.pop(layer, [])
            words.append(np.array(found.routed.pop(layer)))
            whole = sum(map(len, early)) == len(words[-1])
            words.append(np.concatenate([np.array(part) for part in early]) if whole else None)
        best = self._ranked(words)
        return [LayerRouting(*each) for each in zip(names, best[::2], best[1::2], strict=True)]

    def _ranked(self, words: Sequence[np.ndarray | None]) -> list[Ranked | None]:
        """The best of each, those of layers with as many experts at once."""
        out: list[Ranked | None] = [None] * len(words)
        for experts in {word.shape[1] for word in words if word is not None}:
            at = [i for i, word in enumerate(words) if word is not None and word.shape[1] == experts]
            best = ranked(np.concatenate([words[i] for i in at]), self._header.kept)
            edges = np.cumsum([len(words[i]) for i in at])[:-1]
            parts = [np.split(part, edges) for part in best]
            for i, *found in zip(at, *parts, strict=True):
                out[i] = Ranked(*found)
        return out


def fingerprint(routers: Sequence[mx.array]) -> str:
    """Of routers' weights: two models with the same one choose alike."""
    out = hashlib.sha256()
    for weight in routers:
        out.update(str(weight.shape).encode())
        out.update(np.array(mx.view(weight, mx.uint8)))
    return out.hexdigest()[:32]
