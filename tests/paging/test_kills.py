"""``kill -9`` at any moment: no file is left but what belongs to the model, and the next run goes on as ever."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from paging.streamed import write_model
from waiting import soon

OURS = {"m.gguf", "m.gguf.usage"}


def run(path: Path, root: Path, tokens: int) -> subprocess.Popen:
    """Generates with experts that stream; all folders that it may write to are below ``root``."""
    folders = {name: root / name for name in ("HOME", "XDG_CACHE_HOME", "TMPDIR")}
    for folder in folders.values():
        folder.mkdir(parents=True, exist_ok=True)
    call = (sys.executable, "-m", "mlx_moe", "generate", "--model", path, "-p", "the", "-m", str(tokens))
    return subprocess.Popen(
        [*call, "--expert-slots", "6"],
        env=os.environ | {name: str(folder) for name, folder in folders.items()},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def files(root: Path) -> set[str]:
    """All but what MLX itself keeps among temporary files."""
    found = {str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()}
    return {name for name in found if not name.startswith("TMPDIR/mlx/")}


@pytest.mark.full
def test_kills_leave_nothing_behind(tmp_path):
    (tmp_path / "models").mkdir()
    path, rng = write_model(tmp_path / "models" / "m.gguf", tokenizer=True), random.Random(0)
    root = tmp_path / "run"
    first = run(path, root, 8)
    want = first.communicate(timeout=120)[0]
    assert first.returncode == 0 and set(os.listdir(path.parent)) == OURS
    after = files(root)
    for _ in range(8):
        process = run(path, root, 100_000)
        start = rng.choice([rng.uniform(0.2, 2), None])
        if start is None:
            process.stdout.read(1)  # text is being written, and usage saved
            start = rng.uniform(0, 1)
        time.sleep(start)
        process.send_signal(signal.SIGKILL)
        process.communicate()
        assert process.returncode == -signal.SIGKILL and set(os.listdir(path.parent)) == OURS
        assert soon(lambda: not list((root / "TMPDIR").glob("mlx-moe-*")))
    again = run(path, root, 8)
    out, error = again.communicate(timeout=120)
    assert again.returncode == 0 and out.splitlines()[0] == want.splitlines()[0] and "ignored" not in error
    assert files(root) == after and set(os.listdir(path.parent)) == OURS
    assert set(os.listdir(root / "TMPDIR")) <= {"mlx"}
