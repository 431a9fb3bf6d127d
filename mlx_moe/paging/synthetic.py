"""Routing made up to behave like the published model's, since no recording of it is at hand. Knows no MLX.

Logits of each of 512 experts are normal: a fixed part (popularity), a part that wanders (an autoregressive process
over tokens: topics), and a part that is new at every token. The shares were fitted by random search so that LRU over
300 tokens, started with nothing in memory, hits as the published replay of a real run does (``LRU_CURVE``): 43.9, 61.6,
72.2, 79.8 and 84.2 % at 93, 186, 279, 372 and 512 slots per layer, against 43.5, 62, 72, 78.9 and 85. The scale is set
by the report that a bonus of 0.85 is about 2.4 times the spread of the top three, taken as the mean distance of the
first from the third; the guess one layer early by the report that it names 72 % of the experts. Nothing else is known
of the real logits, of their tail below the top least of all: what cache-aware routing does with them is a guess.
"""

from __future__ import annotations

import numpy as np

from mlx_moe.paging.ranks import ranked
from mlx_moe.paging.trace import LayerRouting, Pass, Ranked, Residency, Trace, TraceHeader

EXPERTS, TOP_K, TOKENS = 512, 10, 300
POPULARITY, WANDERING, MEMORY = 0.05, 0.265, 0.952
"""Shares of variance; and how much of the wandering part stays from one token to the next."""
TOP_THREE = 0.85 / 2.4
"""Mean distance of the first logit from the third."""
GUESS_NOISE = 0.29
"""Standard deviations of what is added to a logit for the guess: 72 % of the ten best are right then."""


def synthetic_trace(layers: int, records: tuple[int, ...], tokens: int = TOKENS, seed: int = 0) -> Trace:
    """Single tokens from an empty memory; layers are alike and independent.

    Args:
        records: bytes of one expert by layer.
    """
    logits = _logits(layers, tokens, np.random.default_rng(seed))
    noise = np.random.default_rng(seed + 1).standard_normal(logits.shape, dtype=np.float32)
    guesses = logits + np.float32(GUESS_NOISE * logits.std()) * noise
    routed = [Ranked(*ranked(logits[i], EXPERTS)) for i in range(layers)]
    early = [Ranked(*ranked(guesses[i], EXPERTS)) for i in range(layers)]
    header = TraceHeader(
        fingerprint=f"synthetic, seed {seed}",
        experts=(EXPERTS,) * layers,
        top_k=TOP_K,
        normalize=True,
        trunk=layers,
        record_bytes=records,
        group_sizes=(EXPERTS,) * layers,
        kept=EXPERTS,
        window=8,
        read_ahead=True,
        moce=None,
    )
    start = Residency(((TOP_K, ()),) * layers)
    return Trace(header, (start, *(_pass(routed, early, t) for t in range(tokens))))


def _logits(layers: int, tokens: int, rng: np.random.Generator) -> np.ndarray:
    """[layers, tokens, EXPERTS] float32."""
    fixed = rng.standard_normal((layers, EXPERTS)) * np.sqrt(POPULARITY)
    moving, out = rng.standard_normal((layers, EXPERTS)), np.empty((layers, tokens, EXPERTS), dtype=np.float32)
    for t in range(tokens):
        moving = MEMORY * moving + np.sqrt(1 - MEMORY**2) * rng.standard_normal((layers, EXPERTS))
        fresh = rng.standard_normal((layers, EXPERTS)) * np.sqrt(1 - POPULARITY - WANDERING)
        out[:, t] = fixed + np.sqrt(WANDERING) * moving + fresh
    best = -np.partition(-out, 2, axis=-1)[..., :3]
    return out * np.float32(TOP_THREE / (best.max(axis=-1) - best.min(axis=-1)).mean())


def _pass(routed: list[Ranked], early: list[Ranked], token: int) -> Pass:
    rows = slice(token, token + 1)
    layers = tuple(
        LayerRouting(i, Ranked(*(part[rows] for part in routed[i])), Ranked(*(part[rows] for part in early[i])))
        for i in range(len(routed))
    )
    return Pass(False, 1, 1, 1, layers)
