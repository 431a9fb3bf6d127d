"""Paths and seeds that tests share."""

from __future__ import annotations

import itertools
import os
import random
import sys
import tempfile
from pathlib import Path

import pytest

import mlx_moe  # noqa: F401  first, since MLX reads what it sets in the environment only once

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(Path(__file__).resolve().parent))

ORACLE = ROOT.parent / "shared" / "data" / "oracle"


_CACHES = tempfile.TemporaryDirectory(prefix="mlx-moe-tests-")
_NUMBERS = itertools.count()
os.environ["XDG_CACHE_HOME"] = f"{_CACHES.name}/shared"  # of fixtures of whole modules


@pytest.fixture(autouse=True)
def own_cache_folder(monkeypatch) -> Path:
    """What one test leaves in the user's cache folder is not there for another; not made before it is used."""
    folder = Path(_CACHES.name, str(next(_NUMBERS)))
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    return folder / "mlx_moe"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--soak-seconds", type=float, default=1200, help="of tests marked soak (default: 1200)")
    parser.addoption("--sample-seed", type=int, help="which cases of ``sample`` the fast tier takes (default: any)")


def pytest_configure(config: pytest.Config) -> None:
    """All processes of pytest-xdist have one seed."""
    if config.option.sample_seed is None:
        given = getattr(config, "workerinput", {})
        config.option.sample_seed = given.get("sample_seed", random.randrange(1 << 16))


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node) -> None:
    """Of pytest-xdist: what one of its processes gets."""
    node.workerinput["sample_seed"] = node.config.option.sample_seed


def pytest_report_header(config: pytest.Config) -> str:
    """So that a failure can be repeated."""
    return f"cases sampled with --sample-seed {config.getoption('--sample-seed')}"


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Of tests marked ``sample(n)`` n cases drawn at random stay in the fast tier; the others move to the full one.

    Of those with a parameter ``where`` (simulator, GPU) n at each place. Cases marked full are not drawn.
    """
    cases: dict[tuple[str, object], list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("sample") and not item.get_closest_marker("full"):
            where = item.callspec.params.get("where")
            cases.setdefault((item.nodeid.split("[")[0], where), []).append(item)
    for (name, _), group in cases.items():
        (count,) = group[0].get_closest_marker("sample").args
        rng = random.Random(f"{name} {config.getoption('--sample-seed')}")
        for item in rng.sample(group, max(0, len(group) - count)):
            item.add_marker(pytest.mark.full)


@pytest.fixture(scope="session")
def oracle() -> Path:
    """The folder of reference logits, where the machine has it; tests/golden covers the same ground everywhere."""
    if not (ORACLE / "oracle.npz").exists():
        pytest.skip(f"{ORACLE} is not here")
    return ORACLE


@pytest.fixture
def simulated_gpu(monkeypatch, tmp_path) -> Path:
    """As on a Mac: ops run on Metal text, which the simulator runs. Returns the cache folder, still empty."""
    from custom_kernels import dispatch
    from custom_kernels.portable import Launch
    from metal_sim import why_not
    from simulated import run

    if reason := why_not():
        pytest.skip(reason)
    monkeypatch.setattr(dispatch, "device_choice", lambda: dispatch.Choice("metal", "a simulated GPU"))
    monkeypatch.setattr(dispatch, "_disabled", {})
    monkeypatch.setattr(Launch, "run", run)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "mlx_moe"
