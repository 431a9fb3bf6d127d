"""What the first bytes of a GGUF file tell, so that a model of another architecture is not downloaded."""

from __future__ import annotations

from pathlib import Path

from mlx_moe.formats.gguf.fields import Cursor
from mlx_moe.formats.gguf.header import MAGIC
from mlx_moe.formats.safetensors import FileFormatError

START_BYTES = 1 << 16
"""Enough: writers put ``general.architecture`` first, and what is general before the vocabulary."""
_KEY = "general.architecture"


def architecture(name: str, start: bytes) -> str | None:
    """The architecture that a file names, from its first bytes; None where these do not reach it.

    Raises FileFormatError when the file is not GGUF.
    """
    if start[:4] != MAGIC:
        raise FileFormatError(f"{name}: is not a GGUF file; choose another file")
    cursor = Cursor(Path(name), start, len(start))
    try:
        cursor.take(16, "the start")
        for _ in range(cursor.number("<Q", "the number of metadata keys")):
            key = cursor.string("a metadata key")
            value = cursor.value(cursor.number("<I", key), key)
            if key == _KEY:
                return value if isinstance(value, str) else None
    except FileFormatError:  # the rest of the header is further on; the loader reads all of it
        pass
    return None
