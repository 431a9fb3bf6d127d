"""Where usage is kept, and that what is read and written there does no harm."""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from checkpoints import tiny_config
from mlx_moe import twin_file, usage_store
from mlx_moe.config import ModelConfig
from mlx_moe.paging.index import ExpertIndex, LayerIndex, PartIndex
from mlx_moe.paging.usage import Usage
from mlx_moe.paging.usage_file import encode, fingerprint, most_bytes
from mlx_moe.usage_store import UsageStore

EXPERTS = 12


def model(folder: Path, name: str = "experts.safetensors", size: int = 999) -> tuple[ModelConfig, ExpertIndex]:
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / name
    file.write_bytes(bytes(size))
    config = ModelConfig.from_dict(tiny_config(num_experts=EXPERTS, num_experts_per_tok=2))
    parts = [PartIndex.strided("F32", (1, 2), 8, 0, 8 * i, 24, EXPERTS) for i in range(3)]
    return config, ExpertIndex((file,), (LayerIndex(*parts),) * config.num_hidden_layers)


@pytest.fixture
def store(tmp_path) -> UsageStore:
    return UsageStore.of(*model(tmp_path / "pack"))


def usage(store: UsageStore, value: float = 1.0) -> Usage:
    layers = store.layers - 1
    return Usage(np.full((layers, EXPERTS), value, dtype=np.float32), ((1, 2),) * layers, 5)


def same(a: Usage, b: Usage) -> bool:
    return np.array_equal(a.counts, b.counts) and (a.order, a.tokens) == (b.order, b.tokens)


def leftovers(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir() if path.name.startswith(".")]


# Where


def test_beside_the_model(tmp_path, store, own_cache_folder):
    assert store.read("usage") is None and store.find("usage") is None
    assert store.write("usage", usage(store)) == tmp_path / "pack" / "mlx-moe.usage"
    assert store.write("profile", usage(store, 2)) == tmp_path / "pack" / "mlx-moe.profile"
    assert same(store.read("usage"), usage(store)) and same(store.read("profile"), usage(store, 2))
    assert not own_cache_folder.exists() and not leftovers(tmp_path / "pack")


def test_gguf_files_of_one_folder_keep_apart(tmp_path):
    a, b = (UsageStore.of(*model(tmp_path, name)) for name in ("a.gguf", "b.gguf"))
    assert a.mark != b.mark
    assert a.write("usage", usage(a)).name == "a.gguf.usage" and b.write("usage", usage(b, 2)).name == "b.gguf.usage"
    assert same(a.read("usage"), usage(a)) and same(b.read("usage"), usage(b, 2))


def test_a_folder_that_cannot_be_written(tmp_path, monkeypatch, own_cache_folder):
    """The cache folder is then taken; a file that came with the model is a start, and what is newer goes before it."""
    config, index = model(tmp_path / "pack")
    writable = UsageStore.of(config, index)
    writable.write("usage", usage(writable, 3))
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    store = UsageStore.of(config, index)
    assert same(store.read("usage"), usage(store, 3))
    path = store.write("usage", usage(store, 4))
    assert path == own_cache_folder / "usage" / f"{store.mark}.usage" and same(store.read("usage"), usage(store, 4))
    assert same(writable.read("usage"), usage(store, 4)), "also where the folder can be written again"
    os.utime(path, (1, 1))
    assert same(writable.read("usage"), usage(store, 3))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_without_write_permission(tmp_path, own_cache_folder):
    config, index = model(tmp_path / "pack")
    (tmp_path / "pack").chmod(0o555)
    try:
        store = UsageStore.of(config, index)
        assert own_cache_folder in store.write("usage", usage(store)).parents
    finally:
        (tmp_path / "pack").chmod(0o755)


def test_a_folder_that_fails_when_it_is_written(tmp_path, store, monkeypatch, own_cache_folder):
    real = twin_file.write

    def write(path, *rest):
        if path.parent == tmp_path / "pack":
            raise OSError(28, "No space left on device")
        real(path, *rest)

    monkeypatch.setattr(twin_file, "write", write)
    assert own_cache_folder in store.write("usage", usage(store)).parents


def test_nothing_is_written_into_the_package_or_the_hubs_cache(tmp_path, own_cache_folder):
    config, index = model(tmp_path / "blobs", "0123")
    link = tmp_path / "snapshot" / "experts.safetensors"
    link.parent.mkdir()
    link.symlink_to(index.files[0])
    demo = next((Path(usage_store.__file__).parent / "demo").glob("experts*.safetensors"))
    for file in (link, demo):
        store = UsageStore.of(config, ExpertIndex((file,), index.layers))
        assert own_cache_folder in store.write("usage", usage(store)).parents
        assert len(store.paths["usage"]) == 1
    assert os.listdir(link.parent) == [link.name]


def test_no_folder_at_all(tmp_path, store, monkeypatch, caplog):
    """One warning, and then nothing; the model goes on."""
    nowhere = replace(store, paths={"usage": (), "profile": ()})
    assert nowhere.read("usage") is None
    save, _ = nowhere.savers()
    for _ in range(3):
        save(usage(store))
    assert [r.levelno for r in caplog.records] == [logging.WARNING] and "not remembered" in caplog.text


# Whose


def test_the_fingerprint(tmp_path):
    """Not where the folder is, nor whether a draft layer is there; but sizes, names, geometry and routing."""
    config, index = model(tmp_path / "a")
    mark = fingerprint(config, index)
    assert mark == fingerprint(*model(tmp_path / "other" / "place")) and len(bytes.fromhex(mark)) == 16
    assert mark == fingerprint(config, index.joined(model(tmp_path / "draft", "draft.safetensors")[1]))
    others = [model(tmp_path / "b", size=1000), model(tmp_path / "c", name="x.safetensors")]
    parts = [PartIndex.strided("F32", (1, 2), 8, 0, 24 * i, 8, EXPERTS) for i in range(3)]
    others += [(config, replace(index, layers=(LayerIndex(*parts), *index.layers[1:])))]
    others += [(replace(config, num_experts_per_tok=3), index)]
    assert len({mark, *(fingerprint(*other) for other in others)}) == 5


def test_a_model_that_changed_in_its_place(tmp_path, store, caplog):
    store.write("usage", usage(store))
    now = UsageStore.of(*model(tmp_path / "pack", size=1001))
    assert now.read("usage") is None and "another model" in caplog.text and len(caplog.records) == 1
    now.write("usage", usage(store, 2))
    assert same(now.read("usage"), usage(store, 2))


# What is read


def hostile_link(path: Path) -> None:
    target = path.with_name("secret")
    target.write_bytes(b"x")
    path.symlink_to(target)


def hostile_loop(path: Path) -> None:
    path.symlink_to(path)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda path: path.write_bytes(b"\x80\x04\x95junk" * 9), "not a file of this format"),
        (lambda path: path.mkdir(), "not a plain file"),
        (lambda path: os.mkfifo(path), "not a plain file"),
        (hostile_link, "not a plain file"),
        (hostile_loop, "not a plain file"),
        (lambda path: os.truncate(os.open(path, os.O_CREAT | os.O_WRONLY), 1 << 40), "more than"),
    ],
)
def test_what_is_not_ours_is_ignored_with_one_warning(store, caplog, make, reason):
    path = store.paths["usage"][0]
    make(path)
    started = time.monotonic()
    assert store.read("usage") is None and time.monotonic() - started < 1
    (record,) = caplog.records
    assert record.levelno == logging.WARNING and str(path) in record.message and reason in record.message
    assert "--reset" in record.message


def test_too_many_layers(store, caplog):
    big = Usage(np.ones((store.layers + 1, EXPERTS), dtype=np.float32), ((),) * (store.layers + 1), 1)
    most = most_bytes(store.layers, EXPERTS)
    twin_file.write(store.paths["usage"][0], encode("usage", big, store.mark), most)
    assert store.read("usage") is None and "another model" in caplog.text
    assert len(encode("usage", big, store.mark)) < most, "bounded by layers, not by size"


def test_a_link_is_replaced_and_its_target_left(store):
    path = store.paths["usage"][0]
    hostile_link(path)
    store.write("usage", usage(store))
    assert not path.is_symlink() and path.with_name("secret").read_bytes() == b"x"


def test_reset(store):
    store.write("usage", usage(store))
    store.write("profile", usage(store))
    assert store.reset() == [store.paths["usage"][0]] and store.reset() == []
    assert store.read("usage") is None and store.read("profile") is not None


# What is written


def test_a_failure_leaves_the_old_file_alone(store, monkeypatch):
    store.write("usage", usage(store))
    folder = store.paths["usage"][0].parent

    def fail(*_):
        raise OSError(5, "Input/output error")

    only = replace(store, paths={"usage": store.paths["usage"][:1]})
    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="Input/output error"):
        only.write("usage", usage(store, 2))
    monkeypatch.undo()
    assert same(store.read("usage"), usage(store)) and not leftovers(folder)


def _writer(store: UsageStore, value: float, seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        store.write("usage", usage(store, value))


def test_two_processes(store, caplog):
    """Whoever reads meanwhile finds one of the two, whole."""
    spawn = multiprocessing.get_context("spawn")
    workers = [spawn.Process(target=_writer, args=(store, value, 0.4)) for value in (1.0, 2.0)]
    for worker in workers:
        worker.start()
    seen = set()
    while any(worker.is_alive() for worker in workers):
        found = store.read("usage")
        if found is not None:
            seen.add(float(found.counts[0, 0]))
            assert same(found, usage(store, found.counts[0, 0]))
    assert [worker.exitcode for worker in workers] == [0, 0]
    assert seen and seen <= {1.0, 2.0} and not caplog.records and not leftovers(store.paths["usage"][0].parent)


def test_kills_leave_the_old_content_or_the_new_and_no_other_file(store, caplog):
    folder = store.paths["usage"][0].parent
    store.write("usage", usage(store, 1.0))
    there = sorted(os.listdir(folder))
    code = "import sys; sys.path[:0] = [%r, %r]; import pickle, test_usage_store as t; print(flush=True); "
    code = code % (str(Path(__file__).parent), str(Path(__file__).parent.parent))
    code += "t._writer(pickle.loads(bytes.fromhex(sys.argv[1])), 2.0, 30)"
    import pickle

    for i in range(3):
        worker = subprocess.Popen([sys.executable, "-c", code, pickle.dumps(store).hex()], stdout=subprocess.PIPE)
        worker.stdout.readline()
        time.sleep(0.05 + 0.013 * i)
        os.kill(worker.pid, signal.SIGKILL)
        worker.wait()
        assert float(store.read("usage").counts[0, 0]) in (1.0, 2.0)
        assert sorted(os.listdir(folder)) == there
    assert not caplog.records
