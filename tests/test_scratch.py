"""What a killed process leaves among temporary files is removed, and nothing else is."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time

import pytest

from mlx_moe.scratch import STALE_S, scratch_folder
from waiting import soon


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


@pytest.fixture(scope="module")
def gone() -> int:
    """The number of a process that has ended."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def left(folder, name: str, age_s: float = 2 * STALE_S):
    path = folder / name
    path.mkdir()
    (path / "file").write_bytes(b"x")
    os.utime(path, (0, time.time() - age_s))
    return path


def test_is_empty_and_goes(folder):
    with pytest.raises(KeyError), scratch_folder("test") as path:
        assert path.parent == folder and not os.listdir(path)
        (path / "file").write_bytes(b"x")
        raise KeyError
    assert not os.listdir(folder)


@pytest.mark.parametrize("group", [False, True])
def test_goes_when_its_process_is_killed(folder, group):
    """Alone, or with all of its group; at once, not with the next one."""
    lines = (
        "import sys, time, tempfile",
        "from mlx_moe.scratch import scratch_folder",
        "tempfile.tempdir = sys.argv[1]",
        "with scratch_folder('test') as path:",
        "    (path / 'file').write_bytes(b'x')",
        "    print('there', flush=True)",
        "    time.sleep(60)",
    )
    process = subprocess.Popen(
        [sys.executable, "-c", "\n".join(lines), str(folder)], stdout=subprocess.PIPE, start_new_session=True
    )
    with process:
        assert process.stdout.readline() == b"there\n" and len(os.listdir(folder)) == 1
        (os.killpg if group else os.kill)(process.pid, signal.SIGKILL)
    assert soon(lambda: not os.listdir(folder))


def test_without_a_shell(folder, monkeypatch):
    def fail(*_, **__):
        raise OSError("no shell")

    monkeypatch.setattr(subprocess, "Popen", fail)
    with scratch_folder("test") as path:
        assert os.listdir(folder) == [path.name]
    assert not os.listdir(folder)


def test_what_a_killed_process_left_goes_too(folder, gone):
    left(folder, f"mlx-moe-{gone}-abc")
    with scratch_folder("test") as path:
        assert os.listdir(folder) == [path.name]
    assert not os.listdir(folder)


def test_nothing_else_goes(folder, gone):
    kept = [
        left(folder, f"mlx-moe-{os.getpid()}-abc"),
        left(folder, f"mlx-moe-{os.getppid()}-abc"),
        left(folder, f"mlx-moe-{gone}-new", STALE_S / 2),
        left(folder, f"mlx-moe-{gone}"),
        left(folder, f"other-{gone}-abc"),
        left(folder, "mlx-moe-x-abc"),
    ]
    target = left(folder, "target")
    link = folder / f"mlx-moe-{gone}-link"
    link.symlink_to(target)
    os.utime(link, (0, time.time() - 2 * STALE_S), follow_symlinks=False)
    with scratch_folder("test"):
        pass
    assert sorted(folder.iterdir()) == sorted([*kept, target, link]) and (target / "file").exists()
