"""Temporary folders that also go when the process that made them is killed.

A shell waits beside each for the end of the process, which a pipe tells it, and removes the folder. Where that was
killed too, or there is no shell, the next process that makes such a folder removes it.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
import subprocess
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
    parent = Path(tempfile.gettempdir())
    _sweep(parent)
    folder = parent / f"mlx-moe-{os.getpid()}-{purpose}-{secrets.token_hex(8)}"
    with _removed_if_killed(folder):
        folder.mkdir(mode=0o700)
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def _removed_if_killed(folder: Path) -> Iterator[None]:
    """Until the context ends a shell, which signals to this process's group do not reach, waits for this process."""
    command = ("/bin/sh", "-c", 'while read -r _; do :; done; exec rm -rf -- "$1"', "sh", str(folder))
    none = subprocess.DEVNULL
    try:
        watcher = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=none, stderr=none, start_new_session=True)
    except OSError:
        watcher = None
    try:
        yield
    finally:
        if watcher is not None:
            watcher.stdin.close()
            watcher.wait()


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
