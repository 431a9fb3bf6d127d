"""Models whose experts do not fit into memory: the bits of the model that has them all, whatever disk and arena do."""

from __future__ import annotations

import errno
import gc
import json
import logging
import os
import shutil
import threading
from pathlib import Path
from types import SimpleNamespace

import mlx.core as mx
import numpy as np
import pytest

from disks import BY, read_by, read_with, slow
from mlx_moe import load, load_model, stream_generate, streaming
from mlx_moe.cli import main
from mlx_moe.generation import generate_tokens
from mlx_moe.paging import pager as pager_module
from mlx_moe.paging.plan import PROCESS_BYTES, SYSTEM_BYTES
from mlx_moe.platform import MemoryLimits, taken_bytes
from mlx_moe.runtime import DEMO
from paging.streamed import (
    EXPERTS,
    IDS,
    LAYERS,
    TOP_K,
    bits,
    ceiling,
    descriptors,
    greedy,
    logits,
    opened,
    readers,
    write_model,
)

SLOTS = (4, 8, 12, 20, EXPERTS)


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> Path:
    return write_model(tmp_path_factory.mktemp("streamed") / "m.gguf", mtp=True)


@pytest.fixture(scope="module")
def resident(path):
    """Logits and greedy text of the model with all experts in memory."""
    with load_model(path, mx.float32, resident=True)[0] as model:
        return logits(model), greedy(model)


def same(model, resident) -> bool:
    return np.array_equal(logits(model), resident[0]) and greedy(model) == resident[1]


# Output


@pytest.mark.sample(1)
@pytest.mark.parametrize("slots", SLOTS)
def test_output_does_not_depend_on_the_arena(path, resident, slots):
    with opened(path, slots) as model:
        assert same(model, resident)
        stats = model.experts_stats
        assert stats.slots == slots and (stats.misses > 0) == (slots < EXPERTS)


@pytest.mark.sample(1)
@pytest.mark.parametrize("by", BY)
@pytest.mark.parametrize(("threads", "read_ahead"), [(1, True), (2, True), (8, False)])
def test_output_does_not_depend_on_the_disk(path, resident, monkeypatch, threads, read_ahead, by):
    """Reads that take 0 to 5 ms each; nor on threads and read-ahead."""
    read_by(monkeypatch, by)
    with opened(path, 12, io_threads=threads, read_ahead=read_ahead) as model:
        slow(monkeypatch, 0.002 if threads == 1 else 0.005)
        assert same(model, resident)
        assert (model.experts_stats.ahead_useful > 0) == read_ahead


@pytest.mark.full
@pytest.mark.parametrize("threads", [1, 2, 8])
@pytest.mark.parametrize("read_ahead", [True, False])
@pytest.mark.parametrize("slots", SLOTS)
@pytest.mark.parametrize("by", BY)
def test_output_under_long_delays(path, resident, monkeypatch, by, slots, threads, read_ahead):
    read_by(monkeypatch, by)
    with opened(path, slots, io_threads=threads, read_ahead=read_ahead) as model:
        slow(monkeypatch, 0.02)
        assert same(model, resident)


@pytest.mark.sample(1)
@pytest.mark.parametrize("slots", [8, 12, 15])
@pytest.mark.parametrize("name", ["IQ2_XS-IQ4_NL-Q8_0", "IQ2_S-Q2_0-Q6_K"])
def test_files_of_llama_cpp(oracle, name, slots):
    file = oracle / f"{name}.gguf"
    with load_model(file, mx.float32)[0] as whole, load_model(file, mx.float32, expert_slots=slots)[0] as model:
        assert np.array_equal(logits(model), logits(whole)) and model.experts_stats.misses > 0
        assert greedy(model, 6) == greedy(whole, 6)


PROMPTS = tuple(np.roll(IDS, 7 * i)[: 9 + 7 * i] for i in range(5))


@pytest.fixture(scope="module")
def whole_files(oracle):
    """By name, once: logits of the model in memory, and 64 tokens after each of five prompts."""
    found = {}

    def get(name: str) -> tuple[np.ndarray, list[list[int]]]:
        if name not in found:
            with load_model(oracle / f"{name}.gguf", mx.float32, resident=True)[0] as model:
                found[name] = logits(model), [greedy(model, 64, prompt) for prompt in PROMPTS]
        return found[name]

    return get


@pytest.mark.full
@pytest.mark.parametrize("threads", [1, 2, 8])
@pytest.mark.parametrize("read_ahead", [True, False])
@pytest.mark.parametrize("slots", [8, 12, 20])
@pytest.mark.parametrize("by", BY)
@pytest.mark.parametrize("name", ["IQ2_XS-IQ4_NL-Q8_0", "IQ2_S-Q2_0-Q6_K"])
def test_texts_of_files_of_llama_cpp(oracle, whole_files, monkeypatch, name, slots, by, threads, read_ahead):
    """Also while reads take 0 to 20 ms more, and after resizes; 16 experts per layer, so 20 slots hold all."""
    read_by(monkeypatch, by)
    want, texts = whole_files(name)
    file = oracle / f"{name}.gguf"
    with load_model(file, mx.float32, expert_slots=slots, io_threads=threads, read_ahead=read_ahead)[0] as model:
        assert np.array_equal(logits(model), want)
        assert [greedy(model, 64, prompt) for prompt in PROMPTS] == texts
        assert (model.experts_stats.misses > 0) == (slots < 16)
        for other in (6, 16, slots):
            model.resize_experts(other)
            assert np.array_equal(logits(model), want) and greedy(model, 16, PROMPTS[0]) == texts[0][:16]
        slow(monkeypatch, 0.02)
        assert np.array_equal(logits(model), want) and greedy(model, 16, PROMPTS[1]) == texts[1][:16]


def test_residency_follows_from_the_tokens(path, monkeypatch):
    """Counters of slow and fast disks, and of one and eight threads, agree: nothing depends on when a read ends."""
    found = []
    for threads, delay, by in ((8, 0.0, "library"), (1, 0.003, "python"), (8, 0.004, "library")):
        read_by(monkeypatch, by)
        with opened(path, 10, io_threads=threads) as model:
            slow(monkeypatch, delay, threads)
            logits(model)
            found.append((model.experts_stats.as_dict(), [model._experts._pager.present(i) for i in range(LAYERS)]))
            monkeypatch.undo()
        for name in ("demanded_wait_ms", "device_wait_ms"):
            found[-1][0].pop(name)
    assert found[0] == found[1] == found[2]


def test_resizing_keeps_contents_and_output(path, resident):
    with opened(path, 12) as model:
        for slots in (8, EXPERTS, 6):
            logits(model)
            model._experts.commit(1)
            before = [model._experts._pager.present(i) for i in range(LAYERS)]
            model.resize_experts(slots)
            after = [model._experts._pager.present(i) for i in range(LAYERS)]
            assert all(new[-len(old[-slots:]) :] == old[-slots:] for old, new in zip(before, after, strict=True))
            assert np.array_equal(logits(model), resident[0]) and model.experts_stats.slots == slots
        assert greedy(model) == resident[1]
        with pytest.raises(ValueError, match="3 slots per layer; allowed: at least 4"):
            model.resize_experts(3)


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
def test_a_resize_that_is_interrupted_leaves_a_model(path, resident, monkeypatch, error):
    """With an empty arena of the old size."""
    arena, calls = pager_module.SlotArena, []

    def once(*arguments):
        calls.append(arguments)
        if len(calls) == 1:
            raise error
        return arena(*arguments)

    with opened(path, 8) as model:
        greedy(model)
        monkeypatch.setattr(pager_module, "SlotArena", once)
        with pytest.raises(error):
            model.resize_experts(12)
        assert model.experts_stats.slots == 8 and same(model, resident)
        model.resize_experts(12)
        assert same(model, resident)


def test_an_interrupted_abort_is_ended_by_the_next_pass(path, resident, monkeypatch):
    """And what the pass used is not committed."""
    with opened(path, 8, usage=True) as model:
        pager, learned = model._experts._pager, []
        model(mx.array(IDS[None, :1]))
        stop = pager._reader.queue.stop

        def interrupted():
            monkeypatch.undo()
            raise KeyboardInterrupt

        monkeypatch.setattr(pager._reader.queue, "stop", interrupted)
        with pytest.raises(KeyboardInterrupt):
            pager.abort()
        assert stop == pager._reader.queue.stop and any(entry.used for entry in pager._layers)
        monkeypatch.setattr(pager._layers[0], "learn", learned.append)
        pager.begin(1, 1)
        assert not learned and not any(entry.used for entry in pager._layers)
        assert same(model, resident)


def test_closing_goes_on_where_something_fails(path, monkeypatch, tmp_path):
    """The error is raised, and nothing is left over."""
    gc.collect()
    model = opened(path, 8, record_routing=tmp_path / "t")
    greedy(model)

    def full():
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(model._experts._recorder, "close", full)
    with pytest.raises(OSError, match="No space"):
        model.close()
    assert not readers() and not model._experts._pager._layers and id(model._experts._limits) not in MemoryLimits._held


def test_the_arena_shrinks_between_texts_where_memory_is_short(path, resident, monkeypatch, caplog):
    """Never within one, not below what a token needs, and not where the number was asked for."""
    short = [False]
    monkeypatch.setattr("mlx_moe.platform.under_pressure", lambda: short[0])
    with load_model(path, mx.float32, memory=ceiling(path, 20), usage=False)[0] as model:
        assert model.experts_stats.slots == 20 and same(model, resident)
        arena = model._experts.nbytes
        tokens = generate_tokens(IDS.tolist(), model, max_tokens=10)
        ids = [next(tokens)[0]]
        short[0] = True
        ids += [token for token, _ in tokens]
        assert ids == resident[1] and model.experts_stats.slots == 20
        assert greedy(model) == resident[1] and model.experts_stats.slots == 15
        assert "15 experts per layer stay in memory instead of 20" in caplog.text
        assert model._experts.nbytes < arena
        for _ in range(6):
            assert greedy(model, 1) == resident[1][:1]
        assert model.experts_stats.slots == TOP_K
    with opened(path, 20) as model:
        assert greedy(model) == resident[1] and model.experts_stats.slots == 20


def test_a_resize_that_does_not_fit_changes_nothing(path, resident):
    with load_model(path, mx.float32, expert_slots=8, memory=ceiling(path, 16))[0] as model:
        with pytest.raises(ValueError, match=r"experts take .* in memory, and .* are left"):
            model.resize_experts(EXPERTS)
        assert model.experts_stats.slots == 8 and same(model, resident)


def test_windows_and_rollback(path):
    """What was rejected leaves no trace, in states nor in logits."""
    with opened(path, 10) as model, opened(path) as whole:
        caches = [m.make_cache() for m in (model, whole)]
        for m, cache in zip((model, whole), caches, strict=True):
            m(mx.array(IDS[None, :20]), cache=cache)
            for start, keep in ((20, 3), (23, 0), (23, 5)):
                m.begin(cache)
                m(mx.array(IDS[None, start : start + 6]), cache=cache)
                m.commit(cache, keep)
        last = [np.array(m(mx.array(IDS[None, 28:30]), cache=c)) for m, c in zip((model, whole), caches, strict=True)]
        assert np.array_equal(*last)
        assert all(np.array_equal(a, b) for a, b in zip(*map(bits, caches), strict=True))


def test_batches_and_drafts(path):
    with opened(path, 6) as model, opened(path) as whole:
        ids = mx.array(np.stack([IDS[i : i + 5] for i in range(4)]))
        assert mx.array_equal(model(ids), whole(ids))
        streams = whole.streams(mx.array(IDS[None, :12]))
        drafts = [m.draft(streams, mx.array(IDS[None, 1:13]), m.mtp.make_cache())[0] for m in (model, whole)]
        assert mx.array_equal(*drafts)


def test_passes_whose_results_nobody_looked_at(path):
    """Graphs that are still lazy when later passes overwrite slots read what they should."""
    with opened(path, 5) as model, opened(path) as whole:
        found = []
        for m in (model, whole):
            cache = m.make_cache()
            found.append([m(mx.array(IDS[None, i : i + 4]), cache=cache) for i in range(0, 32, 4)])
        assert all(mx.array_equal(a, b) for a, b in zip(*found, strict=True))


# Reads


def test_a_prompt_reads_each_expert_once(path):
    """Those that it needs, bytes counted; a second prompt reads only what is not in memory."""
    with opened(path, 20, read_ahead=False) as model:
        record = model._experts._pager._layers[0].record_bytes
        prompt = mx.array(np.tile(IDS, 4)[None])
        mx.eval(model.streams(prompt))
        first = model.experts_stats
        assert first.hits == 0 and first.bytes_read == first.misses * record
        assert all(TOP_K < count <= EXPERTS for count in first.layer_misses[:LAYERS])
        mx.eval(model.streams(prompt))
        second = model.experts_stats.since(first)
        assert second.hits + second.misses == first.misses and second.hits >= LAYERS * 10
        assert first.misses * record > second.bytes_read >= second.misses * record


def test_a_prompt_leaves_no_unpacked_experts_in_memory(path):
    """They were held until the layer's next pass: all of a prompt's experts, unpacked, of every layer."""
    with opened(path, 12) as model:
        pager, ids = model._experts._pager, mx.array(np.tile(IDS, 4)[None])
        cache = model.make_cache()
        mx.eval(model(ids, cache=cache), [layer.state for layer in cache])
        held = [graph for entry in pager._layers for readers in entry.readers for graph in readers.graphs]
        assert all(graph.ndim == 2 for graph in held), "matrices of experts are still held"
        layers = {i for i, entry in enumerate(pager._layers) if entry.readers}
        assert layers <= {model.config.num_hidden_layers - 1}, "layers that are done still hold what they computed"


def test_nothing_is_read_twice(path, monkeypatch):
    with opened(path, 12) as model:
        seen, real = [], os.preadv
        read_with(monkeypatch, lambda fd, views, at: seen.append(at) or real(fd, views, at))
        mx.eval(model.streams(mx.array(IDS[None])))
        assert len(seen) == len(set(seen)) > 3 * TOP_K


def test_statistics(tmp_path):
    """Of one text: what the last part of it carries and --stats-json writes."""
    file = write_model(tmp_path / "m.gguf", tokenizer=True)
    model, tokenizer = load(file, dtype=mx.float32, expert_slots=8)
    with model:
        greedy(model, 2)
        *parts, last = stream_generate(model, tokenizer, "the test", max_tokens=4)
        assert all(part.experts is None for part in parts)
        want = last.experts.as_dict()
    assert want["slots"] == 8 and want["misses"] > 0 < want["bytes_read"] and want["hits"] == sum(want["layer_hits"])
    assert len(want["layer_hit_rates"]) == LAYERS and all(0 <= rate < 1 for rate in want["layer_hit_rates"])
    arguments = ["--prompt", "the test", "--max-tokens", "4", "--dtype", "float32", "--expert-slots", "8"]
    assert main(["generate", "--model", str(file), *arguments, "--stats-json", str(tmp_path / "s.json")]) == 0
    assert json.loads((tmp_path / "s.json").read_text())["experts"].keys() == want.keys()


# Faults


@pytest.fixture
def copied(path, tmp_path) -> Path:
    return Path(shutil.copy(path, tmp_path / "m.gguf"))


def fails(model, pattern: str, cache=None) -> None:
    before = None if cache is None else bits(cache)
    with pytest.raises(OSError, match=pattern) as caught:
        model(mx.array(IDS[None, :3]), cache=cache)
    assert "\n" not in str(caught.value) and not readers(), "reads are drained"
    if cache is not None:
        assert all(np.array_equal(a, b) for a, b in zip(bits(cache), before, strict=True))


@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", ["EIO", "end", "EMFILE", "third"])
def test_faults_that_go_away(copied, resident, monkeypatch, kind):
    """The call raises and names file and expert; the cache is as before; the next request works."""
    with opened(copied, 6) as model:
        cache = model.make_cache()
        model(mx.array(IDS[None, :12]), cache=cache)
        mx.eval([layer.state for layer in cache])
        real, count = os.preadv, []

        def read(descriptor, views, at):
            count.append(at)
            if kind == "end":
                return 0
            if kind == "third" and len(count) < 40:
                return real(descriptor, views, at)
            raise OSError(errno.EIO, os.strerror(errno.EIO))

        def no_descriptors(*_, **__):
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

        if kind == "EMFILE":
            model._experts.reader.close()
            monkeypatch.setattr(os, "open", no_descriptors)
        else:
            read_with(monkeypatch, read)
        said = {"end": "the file ends at byte", "EMFILE": "Too many open files"}.get(kind, "Input/output error")
        fails(model, rf"m\.gguf: (expert \d+ of layer \d|n-gram row \d+) cannot be read \({said}", cache)
        monkeypatch.undo()
        assert same(model, resident)


def test_a_failed_read_ahead_costs_a_counter(path, resident, monkeypatch):
    """Speculative reads that fail are dropped; what is needed is read again."""
    with opened(path, 16) as model:
        real = os.preadv

        def read(descriptor, views, at):
            if threading.current_thread() is not threading.main_thread() and speculative.pop(at, None):
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            return real(descriptor, views, at)

        speculative: dict[int, bool] = {}
        reader, start = model._experts.reader, model._experts.reader.start

        def started(fill, demanded, beside, together):
            if not demanded:
                speculative.update({p.offset: True for p in reader._index.reads(fill.layer, fill.expert)[:1]})
            return start(fill, demanded, beside, together)

        monkeypatch.setattr(reader, "start", started)
        read_with(monkeypatch, read)
        assert same(model, resident) and model.experts_stats.ahead_failed > 5


@pytest.mark.sample(1)
@pytest.mark.parametrize("change", ["truncated", "written", "replaced", "gone"])
def test_files_that_change_under_us(copied, resident, change):
    """An error, no wrong text; a file that is only moved away while it is open goes on."""
    with opened(copied, 6) as model:
        model(mx.array(IDS[None, :3]))
        if change == "truncated":
            os.truncate(copied, 100_000)
            fails(model, r"m\.gguf: .* cannot be read \((the file ends at|the file is not what it was)")
        elif change == "written":
            with open(copied, "r+b") as file:
                file.seek(200_000)
                file.write(b"x" * 1000)
            fails(model, r"m\.gguf: .* cannot be read \(the file is not what it was when it was loaded; load it again")
        else:
            copied.unlink()
            if change == "replaced":
                copied.write_bytes(b"something else")
            assert same(model, resident)
            model._experts.reader.close()
            said = "the file is not what it was|the file ends at" if change == "replaced" else "No such file"
            fails(model, rf"m\.gguf: .* cannot be read \(({said})")


def test_an_interrupt_leaves_the_last_complete_token(path, resident, monkeypatch):
    with opened(path, 6) as model:
        cache = model.make_cache()
        model(mx.array(IDS[None, :20]), cache=cache)
        mx.eval([layer.state for layer in cache])
        before = bits(cache)
        pager, calls = model._experts._pager, []
        arrive = pager.arrive

        def interrupted(layer, experts):
            calls.append(layer)
            if layer == 2:
                raise KeyboardInterrupt
            arrive(layer, experts)

        for ids in (IDS[None, 20:21], IDS[None, 20:25], IDS[None, 20:36]):
            monkeypatch.setattr(pager, "arrive", interrupted)
            with pytest.raises(KeyboardInterrupt):
                model(mx.array(ids), cache=cache)
            monkeypatch.undo()
            assert not readers() and not any(entry.loads for entry in pager._layers)
            assert all(np.array_equal(a, b) for a, b in zip(bits(cache), before, strict=True))
        rest = np.array(model(mx.array(IDS[None, 20:]), cache=cache)[0])
        whole = resident[0]
        assert np.abs(rest - whole[20:]).max() < 1e-4 and same(model, resident)


def test_an_interrupted_generation_can_go_on(path, monkeypatch):
    with opened(path, 6) as model:
        want = greedy(model, 8)
        cache, got = model.make_cache(), []
        stream = generate_tokens(IDS.tolist(), model, max_tokens=8, prompt_cache=cache)
        got += [next(stream)[0] for _ in range(3)]
        pager = model._experts._pager
        monkeypatch.setattr(pager, "arrive", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt()))
        with pytest.raises(KeyboardInterrupt):
            next(stream)
        monkeypatch.undo()
        done = cache[0].size() - len(IDS)
        rest = generate_tokens(want[done : done + 1], model, max_tokens=8 - done - 1, prompt_cache=cache)
        assert want[: done + 1] + [token for token, _ in rest] == want and got == want[:3]


# The end


def test_closing_ends_threads_and_files(path):
    before = descriptors(path)
    with opened(path, 8) as model:
        logits(model)
        assert (readers() and descriptors(path) > before) or not Path("/proc/self/fd").exists()
    assert not readers() and descriptors(path) == before
    with pytest.raises(RuntimeError, match="the model was closed; load it again"):
        model(mx.array(IDS[None, :2]))
    model.close()


def test_a_forgotten_model_closes_itself(path):
    before = descriptors(path)
    model = opened(path, 8)
    greedy(model, 2)
    assert readers()
    del model
    gc.collect()
    assert not readers() and descriptors(path) == before


def test_any_thread_may_generate(path, resident):
    with opened(path, 8) as model:
        found = []
        for _ in range(2):
            thread = threading.Thread(target=lambda: found.append(greedy(model)))
            thread.start()
            thread.join()
        assert found == [resident[1]] * 2 and greedy(model) == resident[1]


# Options


def test_memory_decides_how_many_are_in_memory(path, monkeypatch, caplog):
    """A ceiling below all experts streams; plenty keeps all."""
    for slots in (TOP_K, 20, EXPERTS):
        with load_model(path, mx.float32, memory=ceiling(path, slots))[0] as model:
            assert model.experts_stats.slots == slots
    machine = SimpleNamespace(memory_bytes=ceiling(path, 20) + SYSTEM_BYTES, working_set_bytes=None)
    monkeypatch.setattr(streaming, "device", lambda: machine)
    with caplog.at_level(logging.INFO), load_model(path, mx.float32)[0] as model:
        assert model.experts_stats.slots == 20
    assert f"20 of {EXPERTS} experts per layer in memory" in caplog.text
    for options in ({"resident": True}, {"memory": ceiling(path, TOP_K) - 1}):
        with pytest.raises(ValueError, match=r"m.gguf: \d.* are needed for .* may be used; .* machine has 3.\d GB"):
            load_model(path, mx.float32, **options)


@pytest.mark.parametrize("of", ["tiny", "demonstration"])
def test_the_plan_and_the_loader_agree(path, capsys, of):
    """Slots for the same model, machine and memory."""
    source, least = (path, TOP_K) if of == "tiny" else (DEMO, 6)
    for slots in (least, 17, EXPERTS):
        size = f"{ceiling(source, slots) / 1e6 + 0.001:.3f}MB"
        assert main(["plan", "--model", str(source), "--dtype", "float32", "--memory", size, "--json", "-"]) == 0
        with load_model(source, mx.float32, memory=size)[0] as model:
            assert model.experts_stats.slots == json.loads(capsys.readouterr().out)["slots"] == slots
    assert main(["plan", "--model", str(source), "--dtype", "float32", "--json", "-"]) == 0
    with load_model(source, mx.float32)[0] as model:
        assert model.experts_stats.slots == json.loads(capsys.readouterr().out)["slots"] == EXPERTS


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"expert_slots": 3}, "m.gguf: expert_slots is 3; allowed: 4 to 40"),
        ({"expert_slots": 0}, "expert_slots is 0"),
        ({"memory": "much"}, "'much' is not a size"),
        ({"memory": 0}, "memory is 0"),
        ({"io_threads": 0}, "io_threads is 0; allowed: 1 to 256"),
        ({"prefill_step_size": 0}, "prefill_step_size is 0; allowed: 1 or more"),
        ({"io": "fast"}, "io is 'fast'; allowed: direct, buffered"),
        ({"resident": True, "expert_slots": 9}, "resident and expert_slots were both given"),
    ],
)
def test_options_that_cannot_be(path, options, message):
    with pytest.raises(ValueError, match=message):
        load_model(path, **options)


def test_a_second_model_gets_what_is_left(path, resident, monkeypatch):
    """Of the machine, and of a ceiling for the process; what the first one holds comes back when it is closed."""
    machine = SimpleNamespace(memory_bytes=2 * ceiling(path, EXPERTS) + SYSTEM_BYTES, working_set_bytes=None)
    monkeypatch.setattr(streaming, "device", lambda: machine)
    with load_model(path, mx.float32)[0] as first:
        held, _ = MemoryLimits.held_bytes()
        assert first.experts_stats.slots == EXPERTS and held == taken_bytes()
        assert held == pytest.approx(ceiling(path, EXPERTS) - PROCESS_BYTES, rel=0.01)
        machine.memory_bytes = held + ceiling(path, 20) + SYSTEM_BYTES
        with load_model(path, mx.float32)[0] as second:
            assert second.experts_stats.slots == 20
        with load_model(path, mx.float32, memory=held + ceiling(path, 12))[0] as second:
            assert second.experts_stats.slots == 12 and greedy(second, 1) == greedy(first, 1) == resident[1][:1]
            with pytest.raises(ValueError, match=r"may be used; .* GB, of which other models of this proc.* hold 0.\d"):
                load_model(path, mx.float32, memory=held + ceiling(path, 12))
        with pytest.raises(ValueError, match="may be used"):
            load_model(path, mx.float32, memory=held + ceiling(path, TOP_K) - 1)
    with load_model(path, mx.float32, memory=ceiling(path, 12))[0] as model:
        assert model.experts_stats.slots == 12, "nothing is held any more"


def test_pieces_of_prompts_are_planned_for(path, capsys):
    """Smaller ones leave room for more experts; the verb says the same as the loader."""
    size, found = f"{ceiling(path, 8) / 1e6 + 0.001:.3f}MB", []
    for step in (2048, 2040, 1):
        flags = ["--prefill-step-size", str(step)]
        assert main(["plan", "--model", str(path), "--dtype", "float32", "--memory", size, "--json", "-", *flags]) == 0
        with load_model(path, mx.float32, memory=size, prefill_step_size=step)[0] as model:
            found.append(model.experts_stats.slots)
        assert json.loads(capsys.readouterr().out)["slots"] == found[-1]
    assert found[0] == 8 < found[1] < found[2] == EXPERTS


def test_the_command_plans_for_its_pieces(tmp_path, capsys):
    file = write_model(tmp_path / "m.gguf", tokenizer=True)
    arguments = ["--prompt", "the test", "--max-tokens", "1", "--dtype", "float32"]
    for step, enough in (("1", True), ("2048", False)):
        size = f"{ceiling(file, TOP_K, 1) / 1e6 + 0.001:.3f}MB"
        flags = ["--memory", size, "--prefill-step-size", step]
        assert (main(["generate", "--model", str(file), *arguments, *flags]) == 0) == enough
        assert ("are needed" in capsys.readouterr().err) != enough


@pytest.mark.sample(1)
@pytest.mark.parametrize("io", ["direct", "buffered"])
def test_ways_to_read(path, resident, io):
    with opened(path, 8, io=io) as model:
        assert same(model, resident)


@pytest.mark.sample(1)
@pytest.mark.parametrize("io", ["direct", None])
def test_direct_reads_that_cannot_be_are_said_once(path, resident, caplog, monkeypatch, io):
    """Once, whatever the reason; a warning only where direct reads were asked for."""
    monkeypatch.setattr(streaming, "DIRECT_ALIGNMENT", 4096)
    with caplog.at_level(logging.INFO), opened(path, 8, io=io) as model:
        assert same(model, resident)
    said = [record for record in caplog.records if "through the page cache" in record.message]
    assert [record.levelno for record in said] == [logging.WARNING if io else logging.INFO]
