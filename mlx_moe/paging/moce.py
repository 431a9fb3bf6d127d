"""Settings of cache-aware routing: how far experts in memory go before others. Knows no MLX."""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass


@dataclass(frozen=True)
class MoceConfig:
    """Mixture of Cache-conditional Experts (arXiv 2412.00099): it changes output, so it is off unless asked for.

    Attributes:
        bonus: added to the router's logit of experts in memory; 0 is the plain router.
        keep_top: so many of the true best experts of a token are taken as they are.
        max_rank: only experts in memory that are among so many of the true best may be promoted; None is all of them.
            On a GPU more than 64 take several small operations instead of one kernel.
        measure: count how far mixtures are from the router's, a few small operations per layer.
    """

    bonus: float = 0.85
    keep_top: int = 3
    max_rank: int | None = 24
    measure: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.bonus, (int, float)) or not 0 <= self.bonus < math.inf:
            raise ValueError(f"moce bonus is {self.bonus}; allowed: 0 or more")
        for name, least in (("keep_top", 0), ("max_rank", 1)):
            value = getattr(self, name)
            if not (name == "max_rank" and value is None) and _whole(name, value) < least:
                raise ValueError(f"moce {name} is {value}; allowed: {least} or more")

    def check(self, top_k: int) -> None:
        """Raises ValueError, naming the setting, where a token uses more experts than may be chosen from."""
        if self.max_rank is not None and self.max_rank < top_k:
            raise ValueError(f"moce max_rank is {self.max_rank}; allowed: at least {top_k}, as a token uses")


def _whole(name: str, value: object) -> int:
    try:
        return operator.index(value)
    except TypeError:
        raise ValueError(f"moce {name} is {value!r}; needed: a whole number") from None
