"""Which experts a token's own number says it will use: shares learned per token and layer, for the tokens seen most.

A router's choice depends on the token that a position holds more than on its context (Xue et al., OpenMoE,
arXiv:2402.01739, call it context-independent specialisation), and the token is known before its pass begins. So what
tokens used is remembered, and read ahead for every layer at once.

A pure function of the calls, in NumPy: no MLX, no disk, no clock. There are ``ROWS`` rows; a token goes to the row of
its number modulo ROWS, where it stays against others as long as it is seen more often than they are (Misra and Gries,
Finding repeated elements, 1982). Per layer a row holds ``width`` experts with the share of the token's occurrences that
used them: a mean at first, later one that fades (``FADE``).
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence

import numpy as np

ROWS = 4096
"""Tokens that are remembered. Text of the demonstration model has 8,192; to remember all brings half a point."""
LIKELY, DOUBT = 0.4, 8
"""Share from which an expert is read ahead; and cases without it that are counted with those of every token, since few
cases tell little. NOTES.md has what other values do: a lower share hits more often and reads more."""
FADE = 1 / 32
"""Weight of an occurrence, once there were so many."""
_MOST_SEEN = 255
_NONE = 0xFFFF
_MAGIC = b"MLXMOEK1"
_HEAD = struct.Struct("<8sIIII16s")


def width_of(top_k: int, experts: int) -> int:
    """Experts that a row holds per layer: half as many again as a token uses."""
    return min(experts, top_k + (top_k + 1) // 2)


class TokenMemory:
    """Shares of ``layers`` layers with ``experts`` experts each, of which a token uses ``top_k``."""

    def __init__(self, layers: int, experts: int, top_k: int) -> None:
        """Raises ValueError for more experts than the format can number."""
        if experts >= _NONE:
            raise ValueError(f"a layer has {experts} experts; remembered by token: less than {_NONE}")
        self.layers, self._experts, self._top_k = layers, experts, top_k
        shape = (ROWS, layers, width_of(top_k, experts))
        self._keys, self._seen = np.full(ROWS, -1, dtype=np.int32), np.zeros(ROWS, dtype=np.uint8)
        self._ids, self._shares = np.full(shape, _NONE, dtype=np.uint16), np.zeros(shape, dtype=np.float32)

    @property
    def known(self) -> int:
        """Tokens that have a row."""
        return int((self._keys >= 0).sum())

    def add(self, tokens: np.ndarray, ids: np.ndarray) -> None:
        """Accepted tokens [n] used the experts ids [n, layers, k], in this order."""
        for token, used in zip(tokens.tolist(), ids, strict=True):
            row = token % ROWS
            if self._owns(row, token):
                self._add(row, used)

    def likely(self, tokens: Sequence[int]) -> list[list[int]]:
        """By layer: the experts that one of these tokens uses in at least ``LIKELY`` of its cases, the likeliest first.

        Of a token seen n times a share counts n / (n + DOUBT).
        """
        rows = [token % ROWS for token in dict.fromkeys(tokens) if self._keys[token % ROWS] == token]
        seen = self._seen[rows].astype(np.float32)[:, None, None]
        shares = self._shares[rows] * (seen / (seen + DOUBT))
        at = np.nonzero(shares >= LIKELY)
        order = np.argsort(-shares[at], kind="stable")
        out: list[dict[int, None]] = [{} for _ in range(self.layers)]
        for layer, expert in zip(at[1][order].tolist(), self._ids[rows][at][order].tolist(), strict=True):
            out[layer][expert] = None
        return [list(found) for found in out]

    def encode(self, mark: str) -> bytes:
        """What to save: mark with the version; layers, experts, experts per row and layer, rows (uint32); the model's
        fingerprint; of every row its token (int32), how often it was seen (uint8), experts (uint16) and shares (uint8).
        """
        rows = np.flatnonzero(self._keys >= 0)
        head = _HEAD.pack(_MAGIC, self.layers, self._experts, self._ids.shape[2], rows.size, bytes.fromhex(mark))
        shares = np.rint(self._shares[rows] * 255).astype(np.uint8)
        parts = (self._keys[rows].astype("<i4"), self._seen[rows], self._ids[rows].astype("<u2"), shares)
        return head + b"".join(part.tobytes() for part in parts)

    @staticmethod
    def most_bytes(layers: int, experts: int, top_k: int) -> int:
        """The most that ``encode`` returns."""
        return _HEAD.size + ROWS * (5 + 3 * layers * width_of(top_k, experts))

    @classmethod
    def decode(cls, data: bytes, layers: int, experts: int, top_k: int, mark: str) -> TokenMemory:
        """What was saved. Raises ValueError, saying why, for what is not of this format and model."""
        if len(data) < _HEAD.size or data[: len(_MAGIC)] != _MAGIC:
            raise ValueError("it is not a file of this format, or of another version")
        _, depth, count, width, rows, owner = _HEAD.unpack_from(data)
        if owner.hex() != mark or (depth, count, width) != (layers, experts, width_of(top_k, experts)):
            raise ValueError("it belongs to another model")
        cells, at = rows * layers * width, _HEAD.size
        if rows > ROWS or len(data) != at + 5 * rows + 3 * cells:
            raise ValueError("it has another length than it says")
        keys, seen = np.frombuffer(data, "<i4", rows, at), np.frombuffer(data, np.uint8, rows, at + 4 * rows)
        ids = np.frombuffer(data, "<u2", cells, at + 5 * rows).reshape(rows, layers, width)
        shares = np.frombuffer(data, np.uint8, cells, at + 5 * rows + 2 * cells).reshape(ids.shape)
        if (keys < 0).any() or np.unique(keys % ROWS).size != rows or (seen == 0).any():
            raise ValueError("a token is not one, or has two rows")
        if ((ids >= experts) & ((ids != _NONE) | (shares > 0))).any():
            raise ValueError("it names an expert that is not there")
        out, places = cls(layers, experts, top_k), keys % ROWS
        out._keys[places], out._seen[places], out._ids[places] = keys, seen, ids
        out._shares[places] = shares.astype(np.float32) / 255
        return out

    @property
    def digest(self) -> str | None:
        """Of all that ``likely`` depends on, 16 hexadecimal digits; None while nothing is known."""
        return hashlib.sha256(self.encode("")).hexdigest()[:16] if self.known else None

    def _owns(self, row: int, token: int) -> bool:
        """Whether the token has the row now; where it does not, whoever has it is worth one case less."""
        if self._keys[row] == token:
            return True
        self._seen[row] -= self._seen[row] > 0
        if self._seen[row]:
            return False
        self._keys[row], self._ids[row], self._shares[row] = token, _NONE, 0
        return True

    def _add(self, row: int, used: np.ndarray) -> None:
        """One more case [layers, k]. What has no cell takes that of the least share, if that is less than its own."""
        self._seen[row] += self._seen[row] < _MOST_SEEN
        part = max(1 / float(self._seen[row]), FADE)
        ids, shares = self._ids[row], self._shares[row]
        same = ids[:, :, None] == used[:, None, :]
        shares *= np.float32(1 - part)
        shares += np.float32(part) * same.any(axis=2)
        new = ~same.any(axis=1)
        least = np.argsort(shares, axis=1, kind="stable")[:, : used.shape[1]]
        layers, columns = np.nonzero(new)
        cells = least[layers, np.cumsum(new, axis=1)[layers, columns] - 1]
        kept = shares[layers, cells] < part
        layers, columns, cells = layers[kept], columns[kept], cells[kept]
        ids[layers, cells], shares[layers, cells] = used[layers, columns], part
