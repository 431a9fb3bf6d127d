"""What a setting of routing costs and brings: loss of a model on text, one token at a time with a live cache.

That is how decoding runs: a wide batch takes the plain router, and hides what preferring experts in memory does.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_moe.documents import read_documents
from mlx_moe.models.qwen4_exp import Model
from mlx_moe.paging.experts import ArenaExperts
from mlx_moe.paging.moce import MoceConfig
from mlx_moe.paging.simulated import SimulatedExperts
from mlx_moe.paging.statistics import ExpertStats

RESAMPLES = 4000
BLOCK = 16
"""Tokens in a row that are drawn together: losses of neighbours go together."""
_CLEAR_EVERY = 256
INTERIM_EVERY = 256
"""Tokens between two looks at what a long run has so far."""


@dataclass(frozen=True)
class Passage:
    """A document or its start: each of ``inputs`` is followed by the one of ``targets``; bytes of what they say."""

    inputs: tuple[int, ...]
    targets: tuple[int, ...]
    size_bytes: int


@dataclass(frozen=True)
class Score:
    """What a setting gave.

    Attributes:
        losses: [N] float64, nats of every scored token, in order.
        size_bytes: of the scored text.
        experts: what paging took meanwhile; None where nothing streams.
        seconds: that it took.
    """

    losses: np.ndarray
    size_bytes: int
    experts: ExpertStats | None
    seconds: float

    def as_dict(self) -> dict[str, Any]:
        """Figures for tables and JSON."""
        nats, count = float(self.losses.mean()), self.losses.size
        out = {"tokens": count, "nats_per_token": nats, "perplexity": math.exp(nats)}
        out |= {"bits_per_byte": nats * count / math.log(2) / self.size_bytes, "tokens_per_s": count / self.seconds}
        return out | ({} if self.experts is None else _paging(self.experts, count))


def _paging(experts: ExpertStats, tokens: int) -> dict[str, Any]:
    needed = experts.hits + experts.misses
    return {
        "slots": experts.slots,
        "hit_rate": experts.hits / needed if needed else None,
        "misses_per_token": experts.misses / tokens,
        "bytes_per_token": experts.bytes_read / tokens,
        "agreement": experts.agreement,
        "substituted_per_token": experts.substituted / tokens,
        "kl_per_token": sum(experts.layer_kl) / tokens,
    }


def passages(
    paths: Sequence[Path], encode: Callable[[str], list[int]], decode: Callable[[list[int]], str], eos: int, tokens: int
) -> list[Passage]:
    """The first documents of files, ``tokens`` targets in all and as equal a share of each file as can be.

    A document's first token is predicted after the end-of-text token ``eos``, which also ends it unless it is cut.

    Raises ValueError, naming the file, for one that is too short, or when there are fewer tokens than files.
    """
    if tokens < len(paths):
        raise ValueError(f"{tokens} tokens of {len(paths)} files; needed: at least one of each")
    out = []
    for i, path in enumerate(paths):
        share = tokens // len(paths) + (i < tokens % len(paths))
        for text in read_documents(path):
            ids = encode(text)
            inputs, targets = [eos, *ids][:share], [*ids, eos][:share]
            whole = len(targets) > len(ids)
            size = len((text if whole else decode(targets)).encode())
            out.append(Passage(tuple(inputs), tuple(targets), size))
            share -= len(targets)
            if not share:
                break
        else:
            raise ValueError(f"{path} is {share} tokens too short for its share of {tokens}")
    return out


def score(model: Model, texts: Iterable[Passage], progress: Callable[[int], None] = lambda done: None) -> Score:
    """Run passages token by token, each from an empty cache; experts in memory stay from one to the next.

    progress: called with the number of tokens scored.
    """
    before, started = model.experts_stats, time.perf_counter()
    losses, size = [], 0
    for text in texts:
        for (loss,) in _losses(model, text):
            losses.append(loss)
            progress(len(losses))
            if len(losses) % _CLEAR_EVERY == 0:
                mx.clear_cache()
        size += text.size_bytes
    experts = None if before is None else model.experts_stats.since(before)
    return Score(np.array(losses, dtype=np.float64), size, experts, time.perf_counter() - started)


def score_at_once(
    model: Model,
    texts: Sequence[Passage],
    settings: Sequence[MoceConfig | None],
    slots: int,
    progress: Callable[[int], None] = lambda done: None,
    interim: Callable[[list[Score]], None] = lambda scores: None,
) -> list[Score]:
    """What ``score`` gives for each setting with ``slots`` experts per layer in memory and read-ahead off, in one run.

    Settings are the rows of a batch, whose experts in memory are simulated (paging.simulated), from none at the start.

    Args:
        model: with all experts in memory.
        texts: as for ``score``.
        settings: None is the exact router.
        progress: called with the number of tokens scored.
        interim: called now and then with the scores so far; of a passage under way, bytes are its tokens' share.

    Raises ValueError where the model's experts cannot be paged, or slots or a setting do not suit it.
    """
    if not isinstance(model.experts, ArenaExperts):
        raise ValueError("cache-aware routing cannot be used with a model folder, whose experts are all in memory")
    source = SimulatedExperts(model.experts, model.config, settings, slots)
    losses, size, started = [], 0.0, time.perf_counter()

    def so_far() -> list[Score]:
        table, seconds = np.array(losses, dtype=np.float64), time.perf_counter() - started
        stats = source.statistics()
        return [Score(table[:, i], round(size), stats[i], seconds) for i in range(len(settings))]

    with model.taking_experts_from(source):
        for text in texts:
            for row in _losses(model, text, len(settings)):
                losses.append(row)
                size += text.size_bytes / len(text.targets)
                progress(len(losses))
                if len(losses) % _CLEAR_EVERY == 0:
                    mx.clear_cache()
                if len(losses) % INTERIM_EVERY == 0:
                    interim(so_far())
        return so_far()


def _losses(model: Model, text: Passage, rows: int = 1) -> Iterator[np.ndarray]:
    """Nats of each target in every row of a batch that all read the text, [rows] float32.

    The next token is under way when one is yielded.
    """
    cache, waiting = model.make_cache(), None
    for token, target in zip(text.inputs, text.targets, strict=True):
        logits = model(mx.array([[token]] * rows), cache=cache)[:, -1].astype(mx.float32)
        loss = mx.logsumexp(logits, axis=-1) - logits[:, target]
        mx.async_eval(loss)
        if waiting is not None:
            yield np.array(waiting)
        waiting = loss
    yield np.array(waiting)


def interval(differences: np.ndarray, seed: int = 0) -> tuple[float, float]:
    """95 % bootstrap interval of the mean of paired differences [N], in the order of the text.

    Runs of ``BLOCK`` neighbours are drawn, around the end too, so that their likeness does not make it too narrow; of
    few differences shorter ones, or there would be too few to draw from.
    """
    n = differences.size
    block = max(1, min(BLOCK, n // 20))
    sums = np.concatenate([[0.0], np.cumsum(np.concatenate([differences, differences[: block - 1]]))])
    sums = sums[block:] - sums[:-block]  # [N], of the run that starts at each
    drawn = np.random.default_rng(seed).integers(n, size=(RESAMPLES, -(-n // block)))
    low, high = np.quantile(sums[drawn].mean(axis=1) / block, [0.025, 0.975])
    return float(low), float(high)


def against(exact: Score, other: Score, seed: int = 0) -> dict[str, Any]:
    """What a setting costs and brings beside the exact router on the same tokens.

    Raises ValueError where they are not the same number.
    """
    if exact.losses.size != other.losses.size:
        raise ValueError(f"{other.losses.size} and {exact.losses.size} scored tokens cannot be compared")
    differences = other.losses - exact.losses
    low, high = interval(differences, seed)
    mean = float(differences.mean())
    out = {"loss_difference": mean, "loss_difference_95": [low, high]}
    out |= {"perplexity_ratio": math.exp(mean), "perplexity_ratio_95": [math.exp(low), math.exp(high)]}
    if exact.experts is not None and exact.experts.misses:
        out["hit_rate_gained"] = other.as_dict()["hit_rate"] - exact.as_dict()["hit_rate"]
        out["misses_saved"] = 1 - other.experts.misses / exact.experts.misses
    return out
