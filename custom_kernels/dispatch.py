"""Which back end an op runs on: chosen here only, with a reason that is logged once.

The reference defines every op and runs anywhere; ``metal`` and ``cuda`` are the same kernel text for the two GPUs that
MLX has.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import mlx.core as mx

logger = logging.getLogger(__name__)

Backend = Literal["reference", "metal", "cuda"]


@dataclass(frozen=True)
class Choice:
    """A back end and why it was taken."""

    backend: Backend
    reason: str


_forced: Choice | None = None
_disabled: dict[tuple[str, str | None], str] = {}
_logged: set[tuple[str, str, Choice]] = set()


def choose(op: str, variant: str = "") -> Choice:
    """The back end for an op on the default device. variant: which of its kernels, as a block format's name."""
    choice = _forced or _natural(op, variant)
    if (op, variant, choice) not in _logged:
        _logged.add((op, variant, choice))
        logger.info("%s runs on %s: %s", f"{op} {variant}".rstrip(), choice.backend, choice.reason)
    return choice


def _natural(op: str, variant: str) -> Choice:
    reason = _disabled.get((op, None)) or _disabled.get((op, variant))
    return Choice("reference", reason) if reason else device_choice()


def device_choice() -> Choice:
    """What the default device gives an op that is neither forced nor disabled."""
    if mx.default_device() == mx.Device(mx.cpu):
        return Choice("reference", "MLX runs on the CPU")
    if mx.metal.is_available():
        return Choice("metal", "an Apple GPU")
    if mx.cuda.is_available():
        return Choice("cuda", "an NVIDIA GPU")
    return Choice("reference", "this GPU has no kernels here")


def disable(op: str, reason: str, variant: str | None = None) -> None:
    """Fall back to the reference from here on, as when a kernel failed its check on this machine.

    variant: the one kernel meant; None is all of the op. The same reason is logged once.
    """
    if _disabled.get((op, variant)) == reason:
        return
    _disabled[op, variant] = reason
    logger.warning("%s falls back to its reference: %s", f"{op} {variant or ''}".rstrip(), reason)


@contextlib.contextmanager
def forced(backend: Backend) -> Iterator[None]:
    """For tests: every op runs on ``backend`` inside."""
    global _forced
    earlier, _forced = _forced, Choice(backend, "forced")
    try:
        yield
    finally:
        _forced = earlier
