"""Documents in text files, as the scripts and verbs that measure a model read them. Knows no MLX."""

from __future__ import annotations

import lzma
from pathlib import Path


def read_documents(path: Path, limit: int | None = None) -> list[str]:
    """The documents of a UTF-8 file, which NUL bytes separate; ``.xz`` files are unpacked.

    Args:
        limit: take that many bytes from the start, the last document cut.

    Raises OSError or, for a damaged ``.xz`` file, ValueError that names it.
    """
    data = path.read_bytes()
    if path.suffix == ".xz":
        try:
            data = lzma.decompress(data)
        except lzma.LZMAError as error:
            raise ValueError(f"{path}: not a whole .xz file ({error})") from None
    out, used = [], 0
    for part in data.split(b"\0"):
        part = part if limit is None else part[: max(0, limit - used)]
        used += len(part)
        text = part.decode("utf-8", errors="ignore")
        if text:
            out.append(text)
    return out
