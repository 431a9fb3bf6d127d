"""A file that is rewritten in place is never half written, wherever a process ends."""

from __future__ import annotations

import os
import random
import signal
import stat
import subprocess
import sys

import pytest

from mlx_moe import twin_file
from mlx_moe.twin_file import MAGIC, read, write

MOST = 200
A, B, C = b"a" * 150, b"b" * 90, b"c" * MOST
HEAD = 56


@pytest.fixture
def path(tmp_path):
    return tmp_path / "saved"


def test_gives_back_what_was_saved_last(path):
    for content in (A, B, C, b"", A):
        write(path, content, MOST)
        assert read(path, MOST) == content
    assert path.stat().st_size <= 2 * (HEAD + MOST) and os.listdir(path.parent) == [path.name]
    with pytest.raises(ValueError, match=r"^201 bytes are to be saved; allowed: 200$"):
        write(path, C + b"c", MOST)


def test_nothing_saved_so_far(path):
    with pytest.raises(FileNotFoundError):
        read(path, MOST)
    for data in (b"", bytes(10), bytes(HEAD), bytes(HEAD) + A):
        path.write_bytes(data)
        assert read(path, MOST) is None
        write(path, B, MOST)
        assert read(path, MOST) == B


def test_damage_is_found_and_the_other_slot_serves(path):
    """Any bit of the slot saved last: the one before it; of both: an error, until the next save."""
    rng = random.Random(0)
    write(path, A, MOST)
    write(path, B, MOST)
    whole = path.read_bytes()
    for _ in range(300):
        at = HEAD + MOST + rng.randrange(HEAD + len(B))
        changed = bytearray(whole)
        changed[at] ^= 1 << rng.randrange(8)
        path.write_bytes(changed)
        assert read(path, MOST) == A
        changed[HEAD + rng.randrange(len(A))] ^= 1 << rng.randrange(8)
        path.write_bytes(changed)
        with pytest.raises(ValueError, match=r"^it is (damaged|not a file of this format)"):
            read(path, MOST)
    write(path, C, MOST)
    assert read(path, MOST) == C


def test_every_length_of_a_file_cut_short(path):
    write(path, A, MOST)
    write(path, B, MOST)
    whole = path.read_bytes()
    for length in range(len(whole) - MOST + len(B)):
        path.write_bytes(whole[:length])
        try:
            found = read(path, MOST)
        except ValueError:
            found = "damaged"
        assert found == (A if length >= HEAD + len(A) else "damaged" if length else None)


@pytest.mark.parametrize("calls", range(1, 12))
def test_a_process_that_dies_at_any_call(path, calls):
    """At the n-th system call of a save, also in the middle of a write: the old content or the new, no other file."""
    write(path, A, MOST)
    write(path, B, MOST)
    code = f"""
import os, signal, sys
from mlx_moe import twin_file
left = {calls}
def counted(name):
    real = getattr(os, name)
    def call(*args):
        global left
        left -= 1
        if not left:
            if name == "pwrite":
                real(args[0], bytes(args[1])[: len(args[1]) // 2], args[2])
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*args)
    return call
for name in ("open", "pread", "pwrite", "fsync", "fstat", "close"):
    setattr(os, name, counted(name))
from pathlib import Path
twin_file.write(Path(sys.argv[1]), b"c" * {MOST}, {MOST})
"""
    ended = subprocess.run([sys.executable, "-c", code, path], check=False).returncode
    assert ended in (0, -signal.SIGKILL)
    assert read(path, MOST) in ((C,) if ended == 0 else (B, C)) and os.listdir(path.parent) == [path.name]
    write(path, A, MOST)
    assert read(path, MOST) == A


@pytest.mark.parametrize("name", ["fsync", "pwrite"])
def test_a_save_that_fails(path, monkeypatch, name):
    """The file holds what it held; one that was made for it goes again."""

    def fail(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, name, fail)
    with pytest.raises(OSError, match="No space left"):
        write(path, A, MOST)
    assert not path.exists()
    monkeypatch.undo()
    write(path, A, MOST)
    monkeypatch.setattr(os, name, fail)
    for _ in range(2):
        with pytest.raises(OSError, match="No space left"):
            write(path, B, MOST)
        assert read(path, MOST) == A


def test_what_is_not_ours_is_replaced(path, tmp_path):
    other = tmp_path / "other"
    other.write_bytes(b"x" * 30)
    for make in (
        lambda: path.symlink_to(other),
        lambda: path.symlink_to(path),
        lambda: path.hardlink_to(other),
        lambda: path.write_bytes(b"junk"),
        lambda: path.write_bytes(MAGIC + b"junk"),
        lambda: path.write_bytes(bytes(1 << 20)),
        lambda: os.mkfifo(path),
    ):
        make()
        with pytest.raises((ValueError, OSError)):
            read(path, MOST)
        write(path, A, MOST)
        assert read(path, MOST) == A and stat.S_ISREG(path.lstat().st_mode)
        assert other.read_bytes() == b"x" * 30
        path.unlink()
    path.mkdir()
    with pytest.raises(IsADirectoryError):
        write(path, A, MOST)


def test_a_file_that_is_deleted_while_it_is_opened(path, monkeypatch):
    """The save goes into the file that has the name, not into the one that had it."""
    write(path, A, MOST)
    real, gone = twin_file.fcntl.flock, []

    def flock(handle, how):
        if not gone:
            path.unlink()
            gone.append(handle)
        real(handle, how)

    monkeypatch.setattr(twin_file.fcntl, "flock", flock)
    write(path, B, MOST)
    assert gone and read(path, MOST) == B


def test_another_size(path):
    """As a model of another size would use it: an error, and the next save replaces it."""
    write(path, A, MOST)
    write(path, B, MOST)
    with pytest.raises(ValueError, match=r"it has more than|damaged|not a file"):
        read(path, 40)
    write(path, b"d" * 40, 40)
    assert read(path, 40) == b"d" * 40
