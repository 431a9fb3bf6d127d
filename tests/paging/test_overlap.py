"""Reads and computing overlap, in passes of the engine over a scripted disk and a scripted device.

Their clock stands still while Python runs: totals say what the order of reads and computing costs, and nothing else.
"""

from __future__ import annotations

from collections import Counter
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import mlx.core as mx
import numpy as np
import pytest

from custom_kernels.moce_route import plain_route
from mlx_moe.paging import experts as experts_module
from mlx_moe.paging import pager as pager_module
from mlx_moe.paging.files import Read
from mlx_moe.paging.prompt import PromptReads
from paging.scripted import Clock, Device, Disk, ScriptedQueue
from paging.streamed import IDS, TOP_K, opened, write_model

LAYERS = 12
SLOTS = 32
"""Of 40 experts; one in eight places may be filled ahead of a window, so all that a token uses."""
PARTS = 3
"""Reads of a record."""
RECORD_S = 0.001
"""That the bytes of a record take."""


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> Path:
    return write_model(tmp_path_factory.mktemp("overlap") / "m.gguf", layers=LAYERS)


@pytest.fixture(scope="module")
def chosen(path) -> dict[int, list[np.ndarray]]:
    """Number of tokens -> for each layer the experts [T, k] that they use."""
    out = {}
    for count in (1, len(IDS)):
        found = {}
        with opened(path) as model, pytest.MonkeyPatch.context() as patch:
            real = model.experts.moe

            def moe(layer, x, logits, *rest, real=real, found=found):
                found[layer] = np.array(plain_route(logits, TOP_K, True)[0])
                return real(layer, x, logits, *rest)

            patch.setattr(model.experts, "moe", moe)
            mx.eval(model(mx.array(IDS[None, :count]), cache=model.make_cache()))
        out[count] = [found[layer] for layer in range(LAYERS)]
    return out


class Pass:
    """One pass, from an arena without any expert in it.

    Attributes:
        total_s: what it took.
        disk_s, device_s: what each of both took, alone.
        first_s: of that, the first miss: a token's experts of a layer, or the first of the parts in which a prompt's
            come, of which three have room at a time.
    """

    def __init__(self, path: Path, chosen: list[np.ndarray], disk: tuple[float, int], share: float, overlap: bool):
        """
        Args:
            chosen: see above; what is read ahead is just that.
            disk: latency of a read, in RECORD_S, and how many reads have it side by side.
            share: of the time that the disk takes for some experts, what the device takes.
        """
        clock = Clock()
        latency, depth = disk
        self._device, self._missed, self._overlap = Device(clock), Counter(), overlap
        with opened(path, SLOTS, read_ahead=overlap) as model, pytest.MonkeyPatch.context() as patch:
            self._record_bytes = model.experts.records[0][1]
            self._disk = Disk(latency * RECORD_S, self._record_bytes / RECORD_S, depth)
            model.experts.reader.queue = ScriptedQueue(clock, self._disk, _bytes_of)
            self._script(model.experts, chosen, share, patch)
            mx.eval(model(mx.array(IDS[None, : len(chosen[0])]), cache=model.make_cache()))
            self._device.wait()
            assert model.experts.statistics().bytes_read == sum(self._missed.values()) * self._record_bytes
        assert [self._missed[layer] for layer in range(LAYERS)] == [np.unique(ids).size for ids in chosen]
        self.total_s, self.device_s = clock.now, self._device.busy_s
        self.disk_s = sum(map(self._alone_s, self._missed.values()))
        self.first_s = self._alone_s(min(self._missed[0], SLOTS // 3))

    def _script(self, experts, chosen: list[np.ndarray], share: float, patch: pytest.MonkeyPatch) -> None:
        device, missed, (reader, pager) = self._device, self._missed, (experts.reader, experts._pager)
        values, reads, use, use_all = reader.waits.values, pager.reads, pager.use, pager.use_all

        def waited(array):
            device.wait(array)
            return values(array)

        def computed(layer, graphs, used):
            graphs, used = list(graphs), list(used)
            device.queue(graphs, share * self._alone_s(len(used)))
            if not self._overlap:
                device.wait()
            return reads(layer, graphs, used)

        def window(layer, ids):
            missed[layer] += np.unique(ids).size
            return use(layer, ids)

        def prompt(layer, used):
            missed[layer] += len(used)
            return use_all(layer, used)

        def guess(layer, x, biased=False):
            """The device has it when it has done what was queued before."""
            if not self._overlap or layer == LAYERS:
                return None
            ids = mx.array(chosen[layer])
            device.queue([ids], 0)
            return ids

        patch.setattr(reader.waits, "values", waited)
        patch.setattr(experts, "_guess", guess)
        for name, new in (("reads", computed), ("use", window), ("use_all", prompt)):
            patch.setattr(pager, name, new)
        patch.setattr(pager_module, "mx", SimpleNamespace(array=mx.array, eval=device.evaluate))
        patch.setattr(experts_module, "PromptReads", partial(_prompt_reads, self._overlap))

    def _alone_s(self, records: int) -> float:
        """For so many records, on a disk that has nothing else to do."""
        return self._disk.seconds([self._record_bytes // PARTS] * PARTS * records)


def _bytes_of(piece) -> int:
    """That a piece reads of an expert; rows of the n-gram table take no time."""
    return piece.target.nbytes if isinstance(piece, Read) and piece.what.startswith("expert") else 0


def _prompt_reads(double: bool, *arguments) -> PromptReads:
    """double: read a part while the one before is computed."""
    reads = PromptReads(*arguments)
    reads._double &= double
    return reads


@pytest.mark.sample(4)
@pytest.mark.parametrize("tokens", [1, len(IDS)])
@pytest.mark.parametrize("disk", [(0.5, 1), (2, 4), (4, 8)])
@pytest.mark.parametrize("share", [0.5, 1, 2])
def test_reads_and_computing_overlap(path, chosen, tokens, disk, share):
    """Total at most 1.10 of the larger sum and the first miss; without overlap, for equal sums, 1.6 of that."""
    found = Pass(path, chosen[tokens], disk, share, True)
    larger = max(found.disk_s, found.device_s)
    print(f"total {found.total_s / larger:.3f}, the first miss {found.first_s / larger:.3f} of the larger sum")
    assert found.disk_s > 0.05 and found.device_s == pytest.approx(share * found.disk_s, rel=0.3)
    assert found.total_s <= 1.10 * larger + found.first_s
    if share == 1:
        apart = Pass(path, chosen[tokens], disk, share, False)
        assert apart.total_s >= 1.6 * (larger + found.first_s)


def test_the_scripted_disk():
    """Latencies pass side by side, bytes one after another; what is demanded goes first."""
    disk, clock = Disk(0.004, 1000, 2), Clock()
    assert disk.seconds([1]) == pytest.approx(0.005) and disk.seconds([1, 1]) == pytest.approx(0.006)
    assert disk.seconds([1, 1, 1]) == pytest.approx(0.010) and disk.seconds([20, 1]) == pytest.approx(0.025)
    done = []
    queue = ScriptedQueue(clock, disk, lambda piece: 1)
    early, late = (queue.submit([partial(done.append, name)] * 2, demanded=False) for name in "ab")
    first = queue.submit([partial(done.append, "c")])
    assert not early.ended
    first.wait()
    assert clock.now == pytest.approx(0.010) and early.ended and not late.ended and done[:3] == ["a", "a", "c"]
    late.wait()
    assert clock.now == pytest.approx(0.015) and done[3:] == ["b", "b"]
