"""The built wheel, installed and run outside the checkout."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SKIP = shutil.ignore_patterns(".*", "build", "dist", "*.egg-info", "*.so", "__pycache__", "tests")


@pytest.fixture(scope="module")
def installed(tmp_path_factory) -> Path:
    """A folder with nothing but the installed wheel."""
    work = tmp_path_factory.mktemp("wheel")
    shutil.copytree(ROOT, work / "source", ignore=SKIP)
    return _install(work)


def _install(work: Path) -> Path:
    """Build a wheel of ``source``, install it beside."""
    _run(["-m", "build", "--wheel", "--no-isolation", "--outdir", str(work / "dist"), str(work / "source")])
    (wheel,) = (work / "dist").glob("mlx_moe_stream-*-py3-none-*.whl")
    target = work / "installed"
    _run(["-m", "pip", "install", "-q", "--no-deps", "--no-index", "--target", str(target), str(wheel)])
    return target


def _run(command: list[str], **options) -> subprocess.CompletedProcess[str]:
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, **options)
    assert done.returncode == 0, f"{command}: {done.stdout[-2000:]}{done.stderr[-2000:]}"
    return done


def test_the_wheel_holds_both_packages_and_the_demonstration_model(installed):
    for name in ("mlx_moe/__init__.py", "custom_kernels/__init__.py", "mlx_moe/demo/config.json"):
        assert (installed / name).exists(), f"{name} is not in the wheel"
    size = sum(path.stat().st_size for path in (installed / "mlx_moe" / "demo").iterdir())
    assert size < 16e6, f"the demonstration model takes {size / 1e6:.1f} MB"
    assert not any((installed / name).exists() for name in ("tests", "scripts"))


READS = "from mlx_moe.paging.native_reads import library; print(library() is not None)"


def test_the_wheel_reads_by_its_library(installed, tmp_path):
    assert (installed / "mlx_moe" / "paging" / "_reads.so").exists()
    assert _run(["-c", READS], cwd=tmp_path, env=_environment(installed)).stdout == "True\n"


@pytest.mark.full
def test_a_library_that_cannot_be_built_is_no_error(tmp_path):
    """Then Python's threads read; texts are the same, as tests/paging shows."""
    shutil.copytree(ROOT, tmp_path / "source", ignore=SKIP)
    (tmp_path / "source" / "mlx_moe" / "paging" / "reads.c").write_text("no C")
    target = _install(tmp_path)
    assert not (target / "mlx_moe" / "paging" / "_reads.so").exists()
    assert _run(["-c", READS], cwd=tmp_path, env=_environment(target)).stdout == "False\n"
    command = ["generate", "--prompt", "def main():", "--max-tokens", "8", "--temp", "0", "--expert-slots", "12"]
    assert "Generation: 8 tokens" in _run(["-m", "mlx_moe", *command], cwd=tmp_path, env=_environment(target)).stdout


def _environment(installed: Path) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(installed), "HF_HUB_OFFLINE": "1"}


def test_the_wheel_runs_elsewhere(installed, tmp_path):
    environment = _environment(installed)
    where = _run(["-c", "import mlx_moe; print(mlx_moe.__file__)"], cwd=tmp_path, env=environment)
    assert where.stdout.startswith(str(installed)), "another copy was imported"
    command = ["-m", "mlx_moe", "generate", "--prompt", "def read_lines(path):", "--max-tokens", "8", "--temp", "0"]
    lines = _run(command, cwd=tmp_path, env=environment).stdout.splitlines()
    assert lines[0] == "=" * 10 and lines[-4] == "=" * 10
    assert [line.split(":")[0] for line in lines[-3:]] == ["Prompt", "Generation", "Peak memory"]
