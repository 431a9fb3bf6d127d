"""A small file that is rewritten in place and is never half written: two slots, written in turn.

Each slot begins with a mark, a number that grows with every save, the length of what it holds and SHA-256 over number
and content (little-endian). A save clears the head of the older slot, writes the content, has it brought to the disk,
and writes the head last; so whenever a process is killed, the other slot is whole, and no temporary file is left. A
slot without a head is none; a file without any slot, as the first save leaves when it is killed, holds nothing.

Processes that save take turns (``flock``), and who reads waits for a save to end. Knows nothing of what is saved.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import stat
import struct
from collections.abc import Iterator
from pathlib import Path

MAGIC = b"MLXMOET1"
_HEAD = struct.Struct("<8sQQ32s")
_BLANK = bytes(_HEAD.size)
_TRIES = 16  # to open a file that others delete


def read(path: Path, most: int) -> bytes | None:
    """What was saved last; None where a file is there and nothing was saved so far.

    Args:
        most: bytes that may be saved, as in ``write``.

    Raises ValueError, in a sentence without the name, where it is not a plain file of this format, or damaged; OSError
    where it cannot be read.
    """
    if not stat.S_ISREG(path.lstat().st_mode):
        raise ValueError("it is not a plain file")
    with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:  # whatever it is by now
        with contextlib.suppress(OSError):  # a file system without locks: what is torn is found below
            fcntl.flock(file, fcntl.LOCK_SH)
        data = file.read(2 * _slot_bytes(most) + 1)
    slots = _slots(data, most)
    if not slots:
        return None
    return slots[max(slots)][1]


def write(path: Path, content: bytes, most: int) -> None:
    """Save. A link, or a file that is not of this format, is replaced and what it points to left.

    Args:
        most: bytes that may be saved, the same whenever this file is used.

    Raises ValueError where the content is longer; OSError where it cannot be saved, and then the file holds what it
    held.
    """
    if len(content) > most:
        raise ValueError(f"{len(content)} bytes are to be saved; allowed: {most}")
    with _locked(path) as handle:
        slots = _known(handle, most)
        if slots is None:  # not ours
            path.unlink()
        else:
            _save(handle, slots, content, most, path)
            return
    with _locked(path) as handle:
        _save(handle, _known(handle, most) or {}, content, most, path)


def _slot_bytes(most: int) -> int:
    return _HEAD.size + most


def _slots(data: bytes, most: int) -> dict[int, tuple[int, bytes]]:
    """By number: where the slot is, 0 or 1, and its content. Raises ValueError where there are only damaged ones."""
    size, found, reason = _slot_bytes(most), {}, ""
    if len(data) > 2 * size:
        raise ValueError(f"it has more than {2 * size} bytes")
    for place in range(2):
        slot = data[place * size : (place + 1) * size]
        head = slot[: _HEAD.size]
        if head == _BLANK[: len(head)]:
            continue
        if head[: len(MAGIC)] != MAGIC[: len(head)]:
            reason = "it is not a file of this format, or of another version"
            continue
        if len(head) == _HEAD.size:
            _, number, length, digest = _HEAD.unpack(head)
            content = slot[_HEAD.size : _HEAD.size + length]
            if len(content) == length and _digest(number, content) == digest:
                found[number] = place, content
                continue
        reason = reason or "it is damaged"
    if reason and not found:
        raise ValueError(reason)
    return found


def _digest(number: int, content: bytes) -> bytes:
    return hashlib.sha256(struct.pack("<Q", number) + content).digest()


def _known(handle: int, most: int) -> dict[int, tuple[int, bytes]] | None:
    """The slots of an open file, or None where it is not one of these, or also has another name."""
    info = os.fstat(handle)
    if not stat.S_ISREG(info.st_mode) or info.st_nlink != 1:
        return None
    try:
        return _slots(os.pread(handle, 2 * _slot_bytes(most) + 1, 0), most)
    except ValueError:
        return None


def _save(handle: int, slots: dict[int, tuple[int, bytes]], content: bytes, most: int, path: Path) -> None:
    last = max(slots, default=0)
    place = 1 - slots[last][0] if slots else 0
    start = place * _slot_bytes(most)
    try:
        _write_at(handle, _BLANK, start)
        _write_at(handle, content, start + _HEAD.size)
        os.fsync(handle)
        _write_at(handle, _HEAD.pack(MAGIC, last + 1, len(content), _digest(last + 1, content)), start)
    except BaseException:
        if not slots:
            path.unlink(missing_ok=True)
        raise


def _write_at(handle: int, data: bytes, start: int) -> None:
    view = memoryview(data)
    while view:
        done = os.pwrite(handle, view, start)
        view, start = view[done:], start + done


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[int]:
    """The file, open and ours alone until the end; made where there is none."""
    for _ in range(_TRIES):
        try:
            handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o644)
        except OSError as error:
            if error.errno not in (errno.ELOOP, errno.ENXIO) or not _is_special(path):
                raise
            path.unlink()  # a link is replaced, not followed
            continue
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
            if _is_at(path, handle):
                yield handle
                return
        finally:
            os.close(handle)
    raise OSError(errno.EBUSY, "others delete it again and again", str(path))


def _is_special(path: Path) -> bool:
    """Whether it is there and neither a plain file nor a folder."""
    mode = path.lstat().st_mode
    return not (stat.S_ISREG(mode) or stat.S_ISDIR(mode))


def _is_at(path: Path, handle: int) -> bool:
    """Whether an open file still has this name."""
    try:
        return os.path.samestat(path.lstat(), os.fstat(handle))
    except FileNotFoundError:
        return False
