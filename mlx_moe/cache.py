"""What one sequence (or several of equal length) carries from token to token, per layer.

The caches follow mlx-lm's protocol, so its generation, server and evaluation work on them. They hold arrays and numbers
only: ``copy.deepcopy`` works. They cannot be trimmed; instead a window of up to 8 tokens can be rolled back:

    begin(caches);  model(ids, cache=caches);  commit(caches, keep)

(``Model.begin``, ``commit`` and ``rollback`` do this for the model's own caches and tell its expert source.)

Owns: growth of buffers, histories, rollback. Must not know: weights, disks, how states are computed.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import _BaseCache

from custom_kernels.gdn_step import StepLog, gdn_commit

WINDOW = 8
"""The most tokens that one window may hold."""
FIRST_CAPACITY = 256
"""Buffers start at this many positions and double."""


class History:
    """The last ``length`` positions of a growing sequence [B, T, ...]; shorter ones are filled up at the front.

    Inside a window everything since ``begin`` is kept, so that ``commit`` can cut it.
    """

    def __init__(self, length: int):
        self.length = length
        self.value: mx.array | None = None
        self._recording = False
        self._window: mx.array | None = None  # value at begin, then all positions since

    def read(self, like: mx.array, fill: float = 0) -> mx.array:
        """[B, length, ...] in the shape and type of ``like`` [B, T, ...]."""
        if self.value is None:
            self.value = mx.full((like.shape[0], self.length, *like.shape[2:]), fill, dtype=like.dtype)
        return self.value

    def push(self, new: mx.array) -> None:
        """Append [B, T, ...]; ``read`` must have come first."""
        if self._recording:
            joined = self._window = mx.concatenate([self.value if self._window is None else self._window, new], axis=1)
        elif new.shape[1] < self.length:
            joined = mx.concatenate([self.value, new], axis=1)
        else:
            joined = new
        self.value = joined[:, joined.shape[1] - self.length :]

    def copy(self) -> History:
        """Another one with the same arrays."""
        return copy.copy(self)

    def begin(self) -> None:
        """Open a window."""
        self._recording, self._window = True, None

    def commit(self, keep: int) -> None:
        """End the window, keeping its first ``keep`` positions."""
        if self._window is not None:
            self.value = self._window[:, keep : keep + self.length]
        self._recording, self._window = False, None


class LayerCache(_BaseCache):
    """Counting, windows and mlx-lm's protocol; subclasses hold the arrays.

    Subclasses name their saved fields in ``FIELDS``; a field is an array, a number or None.
    """

    FIELDS: tuple[str, ...] = ()

    def __init__(self) -> None:
        self.offset = 0
        self._mark: int | None = None

    @property
    def position(self) -> mx.array:
        """The offset as an int32 array [1], for kernels and compiled functions."""
        return mx.array([self.offset], dtype=mx.int32)

    @property
    def state(self) -> tuple[Any, ...]:
        """The values of ``FIELDS``, in order."""
        return tuple(self._get(name) for name in self.FIELDS)

    @state.setter
    def state(self, values: Sequence[Any]) -> None:
        if len(values) != len(self.FIELDS):
            raise ValueError(f"{type(self).__name__}: state has {len(values)} values; needed: {', '.join(self.FIELDS)}")
        self._mark = None
        self._set(dict(zip(self.FIELDS, values, strict=True)))

    def _get(self, name: str) -> Any:
        return getattr(self, name)

    def _set(self, values: dict[str, Any]) -> None:
        raise NotImplementedError

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays that the cache holds."""
        return sum(value.nbytes for value in self._arrays() if value is not None)

    def _arrays(self) -> Sequence[mx.array | None]:
        raise NotImplementedError

    def empty(self) -> bool:
        """True before the first token."""
        return self.offset == 0

    def size(self) -> int:
        """Tokens seen."""
        return self.offset

    def is_trimmable(self) -> bool:
        """False: recurrent states cannot be shortened. See ``begin`` and ``commit``."""
        return False

    def prepare(self, *, left_padding: Any = None, lengths: Any = None, right_padding: Any = None) -> None:
        """mlx-lm's hook for padded batches, which recurrent layers cannot take."""
        if any(padding is not None and any(padding) for padding in (left_padding, right_padding)):
            raise ValueError("padded batches are not supported: pass rows of equal length")

    def begin(self) -> None:
        """Start a window of up to 8 tokens that can be rolled back."""
        if self._mark is not None:
            raise RuntimeError("a window is already open: commit or roll it back first")
        self._mark = self.offset
        self._begin()

    def commit(self, keep: int) -> None:
        """End the window. Its first ``keep`` tokens stay; the rest was never there.

        Raises RuntimeError without an open window, ValueError when the window has fewer tokens.
        """
        if self._mark is None:
            raise RuntimeError("no window is open: call begin before the tokens that may be rolled back")
        if not 0 <= keep <= self.window:
            raise ValueError(f"keep is {keep}; the window holds {self.window} tokens")
        self._commit(keep)
        self.offset, self._mark = self._mark + keep, None

    @property
    def window(self) -> int:
        """Tokens in the open window, 0 without one."""
        return 0 if self._mark is None else self.offset - self._mark

    def mark(self) -> dict[str, Any]:
        """All that ``restore`` needs; costs no copy of an array."""
        return {
            name: value.copy() if isinstance(value, History | list) else value for name, value in vars(self).items()
        }

    def restore(self, mark: dict[str, Any]) -> None:
        """Be as at ``mark``, of which nothing but tokens added since is undone: rows past the offset do not count."""
        vars(self).update(mark)

    def _count(self, tokens: int) -> None:
        if self._mark is not None and self.window + tokens > WINDOW:
            raise ValueError(f"a window holds at most {WINDOW} tokens; {self.window + tokens} were given")
        self.offset += tokens

    def _begin(self) -> None:
        raise NotImplementedError

    def _commit(self, keep: int) -> None:
        raise NotImplementedError


class LinearCache(LayerCache):
    """A Gated DeltaNet layer: convolution history and recurrent state, and with PLE its ids and convolution history."""

    FIELDS = ("offset", "conv", "recurrent", "ple_ids", "ple_conv", "lengths")

    def __init__(self, conv_length: int, ple_ids: int = 0, ple_conv: int = 0):
        """Lengths of the three histories, in positions; the last two are 0 in layers without PLE."""
        super().__init__()
        self.conv, self.ple_ids, self.ple_conv = History(conv_length), History(ple_ids), History(ple_conv)
        self.recurrent: mx.array | None = None  # [B, Hv, Dv, Dk] float32
        self._base: mx.array | None = None
        self._logs: list[StepLog] = []

    def start(self, inputs: mx.array, heads: tuple[int, int, int]) -> tuple[mx.array, mx.array]:
        """Convolution history [B, K - 1, C] and recurrent state [B, Hv, Dv, Dk] before ``inputs`` [B, T, C]."""
        if self.recurrent is None:
            self.recurrent = mx.zeros((inputs.shape[0], *heads), dtype=mx.float32)
            self._base = self.recurrent if self._mark is not None else None
        return self.conv.read(inputs), self.recurrent

    def advance(self, inputs: mx.array, state: mx.array, log: StepLog | None = None) -> None:
        """Take over the state after ``inputs``; ``log`` is needed inside a window."""
        if self._mark is not None and log is None:
            raise ValueError(f"a window holds at most {WINDOW} tokens; {inputs.shape[1]} were given at once")
        self._count(inputs.shape[1])
        self.conv.push(inputs)
        self.recurrent = state
        if self._mark is not None:
            self._logs.append(log)

    def ple_history(self, ids: mx.array, eos: int) -> mx.array:
        """The ids before ``ids`` [B, T] and those themselves, [B, n - 1 + T]; EOS before the start."""
        history = self.ple_ids.read(ids, eos)
        self.ple_ids.push(ids)
        return mx.concatenate([history, ids], axis=1)

    def ple_conv_history(self, normed: mx.array) -> mx.array:
        """The positions before ``normed`` [B, T, S * H], [B, span, S * H]."""
        history = self.ple_conv.read(normed)
        self.ple_conv.push(normed)
        return history

    def _histories(self) -> tuple[History, History, History]:
        return self.conv, self.ple_ids, self.ple_conv

    def _begin(self) -> None:
        self._base, self._logs = self.recurrent, []
        for history in self._histories():
            history.begin()

    def _commit(self, keep: int) -> None:
        if keep < self.window:
            state, left = self._base, keep
            for log in self._logs:
                taken = min(left, log.k.shape[1])
                state, left = gdn_commit(state, log, taken), left - taken
            self.recurrent = state
        self._base, self._logs = None, []
        for history in self._histories():
            history.commit(keep)

    def _arrays(self) -> Sequence[mx.array | None]:
        return self.recurrent, *(history.value for history in self._histories())

    def _get(self, name: str) -> Any:
        if name == "lengths":
            return tuple(history.length for history in self._histories())
        value = getattr(self, name)
        return value.value if isinstance(value, History) else value

    def _set(self, values: dict[str, Any]) -> None:
        self.offset, self.recurrent = values["offset"], values["recurrent"]
        self.conv, self.ple_ids, self.ple_conv = (History(int(length)) for length in values["lengths"])
        for name in ("conv", "ple_ids", "ple_conv"):
            getattr(self, name).value = values[name]
        self._base, self._logs = None, []


class SparseCache(LayerCache):
    """A QSA layer: keys, values, finished index-block keys, and the raw index keys of the block being filled."""

    FIELDS = ("offset", "ratio", "keys", "values", "blocks", "raw")

    def __init__(self, ratio: int):
        """ratio: tokens per index block."""
        super().__init__()
        self.ratio = ratio
        self.raw = History(ratio - 1)
        self._keys: mx.array | None = None  # [B, Hkv, capacity, D]
        self._values: mx.array | None = None
        self._blocks: mx.array | None = None  # [B, capacity, Di]

    def update(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Append keys and values [B, Hkv, T, D] and return all of them, [B, Hkv, offset + T, D].

        Call it after ``update_blocks``: it moves the offset.
        """
        before = self.offset
        self._count(keys.shape[2])
        self._keys = _append(self._keys, keys, before, axis=2)
        self._values = _append(self._values, values, before, axis=2)
        return self._keys[:, :, : self.offset], self._values[:, :, : self.offset]

    def pending(self, raw: mx.array) -> tuple[mx.array, int]:
        """Raw index keys from the start of the unfinished block on.

        Args:
            raw: [B, T, Di], the new tokens' raw keys, which are remembered.

        Returns:
            [B, offset % ratio + T, Di], and the number of finished blocks before it.
        """
        history = self.raw.read(raw)
        self.raw.push(raw)
        blocks, left = divmod(self.offset, self.ratio)
        return mx.concatenate([history[:, self.ratio - 1 - left :], raw], axis=1), blocks

    def update_blocks(self, new: mx.array | None, before: int) -> mx.array | None:
        """Append finished block keys [B, n, Di] after the first ``before``; returns all of them or None."""
        if new is not None:
            self._blocks = _append(self._blocks, new, before, axis=1)
        total = before + (0 if new is None else new.shape[1])
        return self._blocks[:, :total] if total else None

    def _begin(self) -> None:
        self.raw.begin()

    def _commit(self, keep: int) -> None:
        self.raw.commit(keep)  # buffers keep their rows: everything past the offset is overwritten before it is read

    def _arrays(self) -> Sequence[mx.array | None]:
        return self._keys, self._values, self._blocks, self.raw.value

    def _get(self, name: str) -> Any:
        if name in ("offset", "ratio"):
            return getattr(self, name)
        if name == "raw":
            return self.raw.value
        if name == "blocks":
            blocks = self.offset // self.ratio
            return self._blocks[:, :blocks] if blocks else None
        buffer = getattr(self, "_" + name)
        return None if buffer is None else buffer[:, :, : self.offset]

    def _set(self, values: dict[str, Any]) -> None:
        self.offset, self.ratio = values["offset"], values["ratio"]
        self.raw = History(self.ratio - 1)
        self.raw.value = values["raw"]
        self._keys, self._values, self._blocks = values["keys"], values["values"], values["blocks"]


def _append(buffer: mx.array | None, new: mx.array, used: int, axis: int) -> mx.array:
    """``buffer`` with ``new`` written at position ``used`` of ``axis``, grown when it is full."""
    need = used + new.shape[axis]
    capacity = 0 if buffer is None else buffer.shape[axis]
    if capacity < need:
        target = max(capacity, FIRST_CAPACITY)
        while target < need:
            target *= 2
        shape = list(new.shape)
        shape[axis] = target - used
        room = mx.zeros(shape, dtype=new.dtype)
        head = [] if used == 0 else [buffer[:, :used] if axis == 1 else buffer[:, :, :used]]
        buffer = mx.concatenate([*head, room], axis=axis)
    if axis == 1:
        buffer[:, used:need] = new
    else:
        buffer[:, :, used:need] = new
    return buffer


def begin(caches: Sequence[LayerCache]) -> None:
    """Open a window on every layer: what follows, up to 8 tokens in one or several passes, can be rolled back."""
    for cache in caches:
        cache.begin()


def commit(caches: Sequence[LayerCache], keep: int) -> None:
    """Close the window on every layer and keep its first ``keep`` tokens."""
    for cache in caches:
        cache.commit(keep)
