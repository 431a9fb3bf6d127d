"""Draft windows out of a recording of single tokens, and what drafts cost. Knows no MLX."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from mlx_moe.paging.trace import LayerRouting, Pass, Ranked, Trace

MTP_ACCEPTANCE = (0.97, 0.83)
"""By position, of two drafts of the published model's MTP layer, as its users report; taken as the chance of a draft
whose predecessors were accepted. Prose has less."""


def tokens_per_pass(acceptance: Sequence[float]) -> float:
    """1 + a1 + a1 a2 + …, of drafts each of which counts only after those before it."""
    total = chance = 1.0
    for share in acceptance:
        chance *= share
        total += chance
    return total


def draft_windows(trace: Trace, acceptance: Sequence[float], seed: int = 0) -> Trace:
    """The recording as a run with drafts: tokens t to t + k, of which the first 1 to k + 1 are accepted, then on from
    the first that was not.

    A rejected row is the text's own token at its place, which comes again in the next window; a wrong draft would have
    been another token, whose experts may differ more. Passes that are no single tokens stay as they are.

    Args:
        acceptance: of each draft whose predecessors were accepted; drawn with ``seed``.
    """
    if any(not 0 <= share <= 1 for share in acceptance):
        raise ValueError(f"acceptance is {tuple(acceptance)}; allowed: shares from 0 to 1")
    rng, events, run = random.Random(seed), [], []
    for event in (*trace.events, None):
        if _single(event) and (not run or _alike(event, run[-1])):
            run.append(event)
            continue
        events += _windows(run, acceptance, rng)
        run = [event] if _single(event) else []
        if event is not None and not run:
            events.append(event)
    return replace(trace, events=tuple(events))


def _single(event: object) -> bool:
    return isinstance(event, Pass) and not event.prompt and (event.batch, event.tokens, event.accepted) == (1, 1, 1)


def _alike(one: Pass, other: Pass) -> bool:
    return [(e.layer, e.guess is None) for e in one.layers] == [(e.layer, e.guess is None) for e in other.layers]


def _windows(run: Sequence[Pass], acceptance: Sequence[float], rng: random.Random) -> list[Pass]:
    out, at = [], 0
    while at < len(run):
        rows = run[at : at + 1 + len(acceptance)]
        accepted = 1
        while accepted < len(rows) and rng.random() < acceptance[accepted - 1]:
            accepted += 1
        out.append(_joined(rows, accepted))
        at += accepted
    return out


def _joined(rows: Sequence[Pass], accepted: int) -> Pass:
    layers = []
    for entries in zip(*(row.layers for row in rows), strict=True):
        guess = None if entries[0].guess is None else _stacked([entry.guess for entry in entries])
        layers.append(LayerRouting(entries[0].layer, _stacked([entry.routed for entry in entries]), guess))
    return Pass(False, 1, len(rows), accepted, tuple(layers))


def _stacked(parts: Sequence[Ranked]) -> Ranked:
    return Ranked(*(np.concatenate(same) for same in zip(*parts, strict=True)))
