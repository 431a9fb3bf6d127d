"""Temporary folders that also go when the process that made them was killed: the next one removes them."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

STALE_S = 60.0
"""Folders of processes that are gone stay this long, since a process may be of a container that shares the folder."""
_NAME = re.compile(r"mlx-moe-(\d+)-")


@contextlib.contextmanager
def scratch_folder(purpose: str) -> Iterator[Path]:
    """An empty folder among the system's temporary files, removed in the end. Raises OSError where none can be made.

    purpose: a word in its name, which is mlx-moe-PROCESS-PURPOSE- and something random.
    """
    _sweep(Path(tempfile.gettempdir()))
    with tempfile.TemporaryDirectory(prefix=f"mlx-moe-{os.getpid()}-{purpose}-") as name:
        yield Path(name)


def _sweep(folder: Path) -> None:
    """Remove what processes of this user left that were killed."""
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            found = _NAME.match(entry.name)
            if found is not None and entry.is_dir(follow_symlinks=False) and _is_left(entry, int(found[1])):
                shutil.rmtree(entry.path, ignore_errors=True)


def _is_left(entry: os.DirEntry[str], process: int) -> bool:
    info = entry.stat(follow_symlinks=False)
    return info.st_uid == os.getuid() and time.time() - info.st_mtime > STALE_S and not _is_alive(process)


def _is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        return True
    return True
