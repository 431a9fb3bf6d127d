"""The hashed n-gram table: constants and row ids.

Integers only, and pure functions of the configuration and the token ids, so rows can be read before a pass starts.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import mlx.core as mx

from mlx_moe.config import ModelConfig

_MASK = (1 << 64) - 1
_GAMMA = 0x9E3779B97F4A7C15
_LAYER_STRIDE = 10007
_WITNESSES = (2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37)  # enough for every number below 3.3e24


@dataclass(frozen=True)
class NgramHash:
    """Constants of one PLE layer: multipliers per history place; table sizes and offsets per head."""

    multipliers: tuple[int, ...]
    sizes: tuple[int, ...]
    offsets: tuple[int, ...]
    rows: int  # of the padded table
    eos: int

    @classmethod
    def from_config(cls, config: ModelConfig, index: int) -> NgramHash:
        """Constants of the ``index``-th PLE layer (from 0)."""
        heads, divisor = config.ngram_heads, config.make_ngram_vocab_size_divisible_by
        primes = itertools.islice(_primes(config.ngram_vocab_size_base), heads * index, heads * (index + 1))
        sizes = tuple(primes)
        offsets = (0, *itertools.accumulate(sizes))
        return cls(
            multipliers=_multipliers(config.seed, index, config.ngram_size, config.vocab_size),
            sizes=sizes,
            offsets=offsets[:-1],
            rows=-(-offsets[-1] // divisor) * divisor,
            eos=config.eos_token_ids[0],
        )

    @cached_property
    def _arrays(self) -> tuple[mx.array, mx.array]:
        """Sizes and offsets per head, int64, made once."""
        arrays = (mx.array(self.sizes, dtype=mx.int64), mx.array(self.offsets, dtype=mx.int64))
        mx.eval(arrays)
        return arrays

    def row_ids(self, history: mx.array, count: int) -> mx.array:
        """Table rows of the last ``count`` tokens.

        Args:
            history: [B, n - 1 + count] token ids, EOS before the start of the sequence; may be lazy.

        Returns:
            [B, count, heads] int64. Products of an id and a multiplier stay below 2^63.
        """
        places = self._places(history.astype(mx.int64), count)
        mixed = places[0] * self.multipliers[0]
        orders = []
        for place, multiplier in zip(places[1:], self.multipliers[1:], strict=True):
            mixed = mixed ^ (place * multiplier)
            orders.append(mixed)
        sizes, offsets = self._arrays
        return mx.repeat(mx.stack(orders, axis=-1), len(self.sizes) // len(orders), axis=-1) % sizes + offsets

    def _places(self, history: mx.array, count: int) -> list[mx.array]:
        """h_0, the token itself, and h_k, the token k places back; beyond an EOS that stands before it, all EOS."""
        last = history.shape[1] - count
        places, cut = [history[:, last:]], mx.array(False)
        for k in range(1, len(self.multipliers)):
            back = mx.where(cut, self.eos, history[:, last - k : last - k + count])
            cut = back == self.eos
            places.append(back)
        return places


def _multipliers(seed: int, index: int, count: int, vocab: int) -> tuple[int, ...]:
    """Odd numbers below 2^63 / vocab, from splitmix64's finaliser."""
    half = ((1 << 63) - 1) // vocab // 2
    return tuple(2 * (_mix(seed + _LAYER_STRIDE * index + _GAMMA * (i + 2)) % half) + 1 for i in range(count))


def _mix(z: int) -> int:
    z &= _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)


def _primes(start: int) -> Iterator[int]:
    """The primes from ``start`` on, ascending."""
    return filter(_is_prime, itertools.count(start))


def _is_prime(n: int) -> bool:
    """Miller-Rabin with witnesses that decide every number this small."""
    if n < 2:
        return False
    for p in _WITNESSES:
        if n % p == 0:
            return n == p
    odd, twos = n - 1, 0
    while odd % 2 == 0:
        odd, twos = odd // 2, twos + 1
    return all(_passes(n, a, odd, twos) for a in _WITNESSES)


def _passes(n: int, a: int, odd: int, twos: int) -> bool:
    x = pow(a, odd, n)
    if x in (1, n - 1):
        return True
    for _ in range(twos - 1):
        x = x * x % n
        if x == n - 1:
            return True
    return False
