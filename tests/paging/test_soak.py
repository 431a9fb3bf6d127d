"""A long life with streaming: resizes, prompts, cancelled texts, interrupts at any point, slow reads; and no trace.

``pytest -m soak`` runs it for 20 minutes, ``--soak-seconds N`` for N.
"""

from __future__ import annotations

import contextlib
import gc
import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import mlx.core as mx
import pytest

from checkpoints import tokens
from disks import read_by, slow
from mlx_moe.generation import generate_tokens
from mlx_moe.models.qwen4_exp import Model
from paging.streamed import EXPERTS, TOP_K, greedy, opened, readers, write_model

TOKENS = 8
LENGTHS = (1, 3, 7, 9, 20, 40, 61, 130)
WARM_UP = 20
"""Actions before memory is looked at."""
LEAK_BYTES = 48 << 20

pytestmark = pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="needs timers that interrupt")


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> Path:
    return write_model(tmp_path_factory.mktemp("soak") / "m.gguf")


class Life:
    """One model, used at random; every text is compared with that of the model that has all experts in memory."""

    def __init__(self, path: Path, seed: int) -> None:
        self.rng, self.counts, self.path = random.Random(seed), Counter(), path
        self.prompts = [tokens(length, seed=length) for length in LENGTHS]
        with opened(path) as whole:
            self.texts = [greedy(whole, TOKENS, prompt) for prompt in self.prompts]
        self.model = self._opened()

    def act(self) -> None:
        action = self.rng.choices((self.text, self.cancelled, self.interrupted, self.resized), (5, 2, 3, 2))[0]
        self.counts[action.__name__] += 1
        action()

    def shows_something(self) -> bool:
        """Whether it did everything at least twice."""
        return len(self.counts) == 4 and min(self.counts.values()) > 1

    def text(self) -> None:
        which = self.rng.randrange(len(self.prompts))
        assert greedy(self.model, TOKENS, self.prompts[which]) == self.texts[which], f"prompt {which}, {self.counts}"

    def cancelled(self) -> None:
        which, count = self.rng.randrange(len(self.prompts)), self.rng.randrange(1, TOKENS)
        stream = generate_tokens(self.prompts[which].tolist(), self.model, max_tokens=TOKENS)
        found = [next(stream)[0] for _ in range(count)]
        stream.close()
        assert found == self.texts[which][:count], f"prompt {which}, {self.counts}"

    def interrupted(self) -> None:
        """As by Ctrl-C, wherever the program is; the cache holds the same number of tokens in every layer."""
        which, found = self.rng.randrange(len(self.prompts)), []
        cache = self.model.make_cache()
        stream = generate_tokens(self.prompts[which].tolist(), self.model, max_tokens=TOKENS, prompt_cache=cache)
        with contextlib.suppress(KeyboardInterrupt), _interrupt_after(self.rng.uniform(0.001, 0.2)):
            for token, _ in stream:
                found.append(token)
        stream.close()
        assert found == self.texts[which][: len(found)], f"prompt {which}, {self.counts}"
        assert len({layer.offset for layer in cache}) == 1
        self.text()

    def resized(self) -> None:
        """Now and then of a model that was loaded again."""
        if self.rng.random() < 0.3:
            self.model.close()
            self.model = self._opened()
        slots = self.rng.choice((TOP_K, 6, 10, 13, 20, 31, EXPERTS))
        self.model.resize_experts(slots)
        assert self.model.experts_stats.slots == slots

    def _opened(self) -> Model:
        """Read by the library's threads or by Python's."""
        with pytest.MonkeyPatch.context() as patch:
            read_by(patch, self.rng.choice(("library", "python")))
            return opened(self.path, 10, io_threads=self.rng.choice((1, 2, 8)), usage=True)


@contextlib.contextmanager
def _interrupt_after(seconds: float) -> Iterator[None]:
    def interrupt(*_):
        raise KeyboardInterrupt

    earlier = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, earlier)


def _taken(model: Model) -> tuple[int, int]:
    """Resident bytes, where the system says, and MLX's; with few slots and nothing cached."""
    model.resize_experts(TOP_K)
    gc.collect()
    mx.clear_cache()
    status = Path("/proc/self/statm")
    resident = int(status.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") if status.exists() else 0
    return resident, mx.get_active_memory()


def _descriptors() -> int:
    folder = Path("/proc/self/fd")
    return len(list(folder.iterdir())) if folder.exists() else 0


def _soon(condition: Callable[[], bool]) -> bool:
    """A thread whose start was interrupted ends by itself, a moment later."""
    end = time.monotonic() + 2
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.01)
    return True


def _live(path: Path, seconds: float, monkeypatch) -> None:
    gc.collect()
    files, threads, seed = _descriptors(), threading.active_count(), random.randrange(1 << 30)
    print("seed", seed)
    life = Life(path, seed)
    slow(monkeypatch, 0.002, seed)
    end, start = time.monotonic() + seconds, None
    while time.monotonic() < end or start is None or not life.shows_something():
        life.act()
        assert _soon(lambda: len(readers()) <= 8 and _descriptors() <= files + 2), f"{_descriptors()}, {readers()}"
        if start is None and sum(life.counts.values()) == WARM_UP:
            start = _taken(life.model)
    last = _taken(life.model)
    print(dict(life.counts), "resident and MLX bytes after the warm-up and in the end:", start, last)
    life.model.close()
    assert last[0] - start[0] < LEAK_BYTES and last[1] - start[1] < 1 << 20, f"from {start} to {last} bytes"
    assert _soon(lambda: not readers() and threading.active_count() == threads and _descriptors() == files)


@pytest.mark.full
def test_a_short_life(path, monkeypatch):
    _live(path, 20, monkeypatch)


@pytest.mark.soak
def test_a_long_life(path, monkeypatch, request):
    _live(path, request.config.getoption("--soak-seconds"), monkeypatch)
