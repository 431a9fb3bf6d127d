"""A table of rows that stays in the file that it came in: where it is, and how to know it again."""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlx_moe.formats.pack.layout import packable
from mlx_moe.formats.safetensors import FileFormatError
from mlx_moe.paging.index import RowIndex

_END_BYTES = 1 << 20
_FIELDS = {"file": str, "offset": int, "bytes": int, "rows": int, "width": int, "format": str, "sha256": str}


@dataclass(frozen=True)
class TableReference:
    """The n-gram table's place in another file.

    Attributes:
        file: full path at the time of the conversion.
        offset, bytes: of the table in it.
        rows, width, format: what the bytes are.
        sha256: of the size and the first and last MiB of the table.
    """

    file: str
    offset: int
    bytes: int
    rows: int
    width: int
    format: str
    sha256: str

    @classmethod
    def to_table(cls, index: RowIndex) -> TableReference:
        """Reads the table's ends."""
        size = index.rows * index.row_bytes
        path = index.file.absolute()
        digest = _fingerprint(path, index.offset, size)
        if digest is None:
            raise FileFormatError(f"{path}: became shorter since it was opened; open it again")
        return cls(str(path), index.offset, size, index.rows, index.width, index.format, digest)

    @classmethod
    def from_json(cls, where: Path, value: Any) -> TableReference:
        """Read and check config.json's entry. Raises FileFormatError, naming ``where``."""
        if not isinstance(value, Mapping) or any(type(value.get(name)) is not kind for name, kind in _FIELDS.items()):
            raise FileFormatError(f"{where}: pack.ngram is incomplete; corrupt, convert the model again")
        out = cls(**{name: value[name] for name in _FIELDS})
        form = packable(f"{where}: pack.ngram", out.format)
        whole = 0 < out.width < 1 << 20 and out.width % form.block_weights == 0 and 0 < out.rows < 1 << 31
        if not whole or out.offset < 0 or out.bytes != out.rows * form.row_bytes(out.width) or "\0" in out.file:
            raise FileFormatError(f"{where}: pack.ngram does not fit itself; corrupt, convert the model again")
        return out

    def find(self, folder: Path) -> RowIndex:
        """The table where it was, or in a file of the same name in the pack's folder or beside it.

        Raises FileFormatError, in one line with the remedy, when it is nowhere or has changed.
        """
        name = Path(self.file).name
        for path in (Path(self.file), folder / name, folder.parent / name):
            if _fingerprint(path, self.offset, self.bytes) == self.sha256:
                return RowIndex(path, self.offset, self.rows, self.width, self.bytes // self.rows, self.format)
        what = "has changed" if os.path.exists(self.file) else "is not there any more"
        remedy = f"put {name} into {folder} or beside it, or convert again with --copy-table"
        raise FileFormatError(f"{folder}: the n-gram table was left in {self.file}, which {what}; {remedy}")


def _fingerprint(path: Path, offset: int, size: int) -> str | None:
    """None when there is no such file or it is too short."""
    try:
        state = path.stat()
        if not stat.S_ISREG(state.st_mode) or state.st_size < offset + size:
            return None
        with path.open("rb") as file:
            digest = hashlib.sha256(size.to_bytes(8, "little"))
            for start in (0, max(size - _END_BYTES, 0)):
                file.seek(offset + start)
                digest.update(file.read(min(size, _END_BYTES)))
            return digest.hexdigest()
    except OSError:
        return None
