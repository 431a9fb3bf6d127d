"""Models whose experts stream remember which they use: text stays the same, and a start follows from the file alone."""

from __future__ import annotations

import gc
import inspect
import json
import os
import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from disks import read_with, slow
from mlx_moe import MoceConfig, load, load_model, stream_generate
from mlx_moe.cli.usage import store_of
from mlx_moe.generation import process_prompt
from mlx_moe.paging import learning
from mlx_moe.paging.usage import Usage
from mlx_moe.quality import Passage, score
from mlx_moe.runtime import DEMO
from mlx_moe.static_profile import profile
from mlx_moe.usage_store import LEARNED, UsageStore
from paging.streamed import EXPERTS, IDS, LAYERS, TOP_K, greedy, logits, write_model

SLOTS = 10
ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def path(tmp_path) -> Path:
    """A model of its own, since usage is remembered beside it."""
    return write_model(tmp_path / "m.gguf", mtp=True)


def opened(path: Path, slots: int = SLOTS, **options):
    return load_model(path, mx.float32, expert_slots=slots, **options)[0]


def present(model) -> list[list[int]]:
    return [model._experts._pager.present(i) for i in range(LAYERS)]


def store(path: Path) -> UsageStore:
    return store_of(path)


def put(path: Path, kind: str = "usage", seed: int = 0) -> Usage:
    """A file with random contents."""
    rng, where = np.random.default_rng(seed), store(path)
    counts = rng.uniform(0, 300, (LAYERS, EXPERTS)).astype(np.float32)
    usage = Usage(counts, tuple(tuple(rng.permutation(EXPERTS)[:SLOTS].tolist()) for _ in range(LAYERS)), 999)
    where.write(kind, usage)
    return usage


# What is learned


def test_what_a_run_used_is_what_the_next_starts_with(path):
    """Counts are those of the ids that the exact router chose, of prompts, single tokens and windows."""
    with opened(path) as model:
        assert model.experts_stats.seed == "empty" and model.experts_stats.seed_hash is None
        assert not any(present(model))
        logits(model)
        held = present(model)
    with load_model(path, mx.float32, resident=True)[0] as model:
        pieces = profile(model, [IDS.tolist()])
    found = store(path).read("usage")
    assert found.tokens == len(IDS) and [set(row) for row in found.order[:LAYERS]] == [set(row) for row in held]
    np.testing.assert_allclose(found.counts[:LAYERS], pieces.counts, rtol=0.02)  # but for what faded
    with opened(path) as model:
        stats = model.experts_stats
        assert stats.seed == "usage" and len(stats.seed_hash) == 16 and stats.bytes_read > 0
        best = [set(np.argsort(row)[-4:].tolist()) for row in found.counts[:LAYERS]]
        assert all(few <= set(row) and len(row) == SLOTS for few, row in zip(best, present(model), strict=True))
        again = stats.seed_hash, present(model)
    with opened(path) as model:
        assert (model.experts_stats.seed_hash, present(model)) == again, "the same file, the same start"


def test_rejected_tokens_and_aborted_passes_teach_nothing(path, monkeypatch):
    model = opened(path)
    layers = model._experts._pager._usage
    cache = model.make_cache()
    mx.eval(model(mx.array(IDS[None, :20]), cache=cache))
    model.begin(cache)
    mx.eval(model(mx.array(IDS[None, 20:26]), cache=cache))
    model.commit(cache, 2)
    assert {layer.tokens for layer in layers[:LAYERS]} == {22} and layers[LAYERS].tokens == 0
    own = [layer.own for layer in layers]
    real, count = os.preadv, iter(range(1000))

    def fail(*arguments):
        if next(count) > 3:
            raise OSError(5, "Input/output error")
        return real(*arguments)

    read_with(monkeypatch, fail)
    for ids in (IDS[None, :1], IDS[None, 2:30]):  # a window and a prompt
        with pytest.raises(OSError, match="Input/output error"):
            for _ in range(20):
                mx.eval(model(mx.array((ids + 7) % 100), cache=cache))
                own = [layer.own for layer in layers]  # unless it failed
    monkeypatch.undo()
    model._experts.begin(mx.array([[1]]))
    assert all(np.array_equal(a, layer.own) for a, layer in zip(own, layers, strict=True))
    model.close()
    kept = store(path).read("usage")
    assert np.array_equal(kept.counts[: len(own)], np.stack(own).astype(np.float32))


def test_a_batch_counts_every_row(path):
    with opened(path) as model:
        mx.eval(model(mx.array(np.stack([IDS[:3], IDS[3:6]]))))
        model._experts.commit(2)
        layer = model._experts._pager._usage[0]
        assert layer.tokens == 4 and abs(layer.own.sum() - 4 * TOP_K) < 0.05


# When it is saved


def test_saved_now_and_then(path, monkeypatch):
    """Between passes, not in the middle of one, and at the end however it comes."""
    monkeypatch.setattr(learning, "SAVE_EVERY", 16)
    model = opened(path)
    logits(model, (20, 1))
    assert store(path).read("usage").tokens == 20
    logits(model, (10, 1))
    assert store(path).read("usage").tokens == 20
    del model
    gc.collect()
    assert 30 <= store(path).read("usage").tokens <= 32, "a model that is forgotten"


@pytest.mark.full
def test_the_end_of_the_process(path):
    code = (
        "import sys; sys.path.insert(0, sys.argv[2]); import test_learned_usage as t; from pathlib import Path;"
        "model = t.opened(Path(sys.argv[1])); t.logits(model, (20, 1))"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-c", code, str(path), str(ROOT / "tests")], check=True, env=environment)
    assert store(path).read("usage").tokens == 20


def test_neither_read_nor_written(path):
    """Without usage, and where all experts are in memory."""
    usage = put(path)
    before = store(path).find("usage").read_bytes()
    for options in ({"usage": False}, {"usage": False, "seed_residency": "empty"}, {"slots": EXPERTS}):
        with opened(path, **options) as model:
            logits(model, (20, 1))
            assert model.experts_stats.seed == "empty" and model.experts_stats.seed_hash is None
    assert store(path).find("usage").read_bytes() == before and usage.tokens == 999
    store(path).reset()
    for options in ({"usage": False}, {"slots": EXPERTS}):
        with opened(path, **options) as model:
            logits(model, (20, 1))
    assert store(path).find("usage") is None


def test_usage_that_is_not_the_start_is_kept(path):
    put(path)
    with opened(path, seed_residency="empty") as model:
        assert not any(present(model)) and model.experts_stats.seed == "empty"
        logits(model)
    assert store(path).read("usage").tokens == 999 + len(IDS)


# Settings


def test_seeds(path):
    hashes = {}
    put(path)
    put(path, "profile", 1)
    for name, options in {
        "blend": {},
        "profile": {"seed_residency": "profile"},
        "empty": {"seed_residency": "empty"},
        "profile, moce": {"moce": MoceConfig()},
        "profile, no usage": {"usage": False},
        "blend, moce": {"moce": MoceConfig(), "seed_residency": "usage"},
    }.items():
        with opened(path, **options) as model:
            stats = model.experts_stats
            assert stats.seed == name.split(",")[0] and (stats.seed_hash is None) == (stats.seed == "empty")
            assert stats.as_dict()["seed_hash"] == stats.seed_hash == stats.since(stats).seed_hash
            hashes.setdefault(stats.seed, set()).add((stats.seed_hash, str(present(model))))
    assert {name: len(found) for name, found in hashes.items()} == {"blend": 1, "profile": 1, "empty": 1}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"seed_residency": "full"}, "seed_residency is 'full'; allowed: usage, profile, empty"),
        ({"eviction": "fifo"}, "eviction is 'fifo'; allowed: lru, frequency"),
        ({"usage": False, "seed_residency": "usage"}, "seed_residency is usage, which is off; choose profile or empty"),
    ],
)
def test_settings_that_cannot_be(path, options, message):
    with pytest.raises(ValueError, match=message):
        opened(path, **options)


def test_eviction(path):
    """By age or by worth: other experts stay; the first as without usage."""
    found = {}
    for name, options in {
        "default": {"seed_residency": "empty"},
        "frequency": {"eviction": "frequency", "usage": False},
        "lru": {"eviction": "lru", "seed_residency": "empty"},
        "off": {"usage": False},
    }.items():
        with opened(path, read_ahead=False, **options) as model:
            logits(model, (1,) * 20)
            found[name] = [set(row) for row in present(model)], model.experts_stats.misses
    assert found["default"] == found["frequency"] != found["lru"] == found["off"]


def test_resizing_keeps_what_would_leave_last(path):
    put(path)
    with opened(path) as model:
        logits(model)
        pager = model._experts._pager
        last = [pager.leaving(i)[-5:] for i in range(LAYERS)]
        model.resize_experts(5)
        assert [sorted(row) for row in present(model)] == [sorted(row) for row in last]
        tokens = [layer.tokens for layer in pager._usage[:LAYERS]]
        logits(model)
        assert [layer.tokens for layer in pager._usage[:LAYERS]] == [n + len(IDS) - 5 for n in tokens]


# Output


@pytest.mark.sample(1)
@pytest.mark.parametrize("slots", [4, 7, 12])
@pytest.mark.parametrize("options", [{}, {"eviction": "lru"}, {"seed_residency": "profile"}, {"usage": False}], ids=str)
def test_text_is_the_same_whatever_the_start(path, slots, options):
    with load_model(path, mx.float32, resident=True)[0] as model:
        want = logits(model), greedy(model, 4)
    put(path, seed=slots)
    put(path, "profile", seed=9 + slots)
    with opened(path, slots, **options) as model:
        assert np.array_equal(logits(model), want[0]) and greedy(model, 4) == want[1]


@pytest.mark.full
def test_text_of_the_demonstration_model():
    """Its files are the package's, so what it learns is in the cache folder."""
    before = sorted(DEMO.iterdir())
    texts = []
    for options in ({"expert_slots": EXPERTS}, {"expert_slots": SLOTS}, {"expert_slots": SLOTS}):
        model, tokenizer = load(dtype=mx.float32, **options)
        with model:
            texts.append("".join(p.text for p in stream_generate(model, tokenizer, "def main():", max_tokens=5)))
            seed = model.experts_stats.seed
    assert texts[0] == texts[1] == texts[2] and seed == "usage"
    assert sorted(DEMO.iterdir()) == before and "mlx_moe/usage" in str(store(DEMO).find("usage"))


def test_a_damaged_file_costs_one_warning(path, caplog):
    with load_model(path, mx.float32, resident=True)[0] as model:
        want = logits(model)
    put(path)
    file = store(path).find("usage")
    file.write_bytes(file.read_bytes()[:-1] + b"?")
    with opened(path) as model:
        assert np.array_equal(logits(model), want) and model.experts_stats.seed == "empty"
    assert [r.message for r in caplog.records if str(file) in r.message] == [
        f"{file} is ignored: it is damaged; 'mlx-moe usage --reset' with the model deletes it"
    ]
    assert store(path).read("usage").tokens == len(IDS), "and is replaced"


def test_a_place_that_cannot_be_written_costs_one_warning(path, caplog, monkeypatch):
    monkeypatch.setattr(UsageStore, "write", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left")))
    monkeypatch.setattr(learning, "SAVE_EVERY", 8)
    with opened(path) as model:
        logits(model)
    assert [r.levelname for r in caplog.records if "not remembered" in r.message] == ["WARNING"]


def test_cache_aware_routing_is_a_function_of_the_file(path, monkeypatch):
    """The same file, text, counters and residents under random read times and one to eight threads; another, others."""
    found, moce = [], MoceConfig(bonus=3.0)
    for seed, threads, delay_s in ((0, 8, 0.0), (0, 1, 0.0005), (0, 8, 0.003), (5, 8, 0.0)):
        put(path, seed=seed)
        with opened(path, io_threads=threads, moce=moce, seed_residency="usage") as model:
            slow(monkeypatch, delay_s, seed=threads)
            out, text = logits(model, (12, 1, 4, 1)), greedy(model, 3)
            stats = {k: v for k, v in model.experts_stats.as_dict().items() if not k.endswith("_ms")}
            found.append((out.tobytes(), text, stats, present(model)))
            monkeypatch.undo()
    assert found[0] == found[1] == found[2]
    assert found[3][0] != found[0][0] and found[3][2]["seed_hash"] != found[0][2]["seed_hash"]


def test_cache_aware_routing_does_not_depend_on_usage_by_default(path):
    """A profile is the start then, if there is one."""
    texts = []
    for seed in (None, 0, 5):
        if seed is not None:
            put(path, seed=seed)
        with opened(path, moce=MoceConfig(bonus=3.0)) as model:
            texts.append(logits(model, (1,) * 12).tobytes())
    assert texts[0] == texts[1] == texts[2]
    put(path, "profile", 3)
    with opened(path, moce=MoceConfig(bonus=3.0)) as model:
        assert logits(model, (1,) * 12).tobytes() != texts[0] and model.experts_stats.seed == "profile"


# The profile


def test_a_profile_is_what_the_exact_router_picks(path):
    """Streaming or not, with cache-aware routing or not, whatever the pieces."""
    texts = [IDS.tolist(), IDS[:15].tolist()]
    with load_model(path, mx.float32, resident=True)[0] as model:
        want = profile(model, texts)
        source = model._experts
        assert profile(model, texts, progress=lambda done, total: None).tokens == 55 == want.tokens
        assert model._experts is source
        with pytest.raises(ValueError, match="0 tokens"):
            profile(model, [[]])
    assert (want.counts.sum(axis=1) == 55 * TOP_K).all() and want.counts.shape == (LAYERS, EXPERTS)
    for options in ({}, {"moce": MoceConfig(bonus=5.0)}):
        with opened(path, usage=False, **options) as model:
            assert np.array_equal(profile(model, texts).counts, want.counts)


# What it brings


def _sources(names: str) -> list[str]:
    return [inspect.getsource(__import__(name, fromlist=["_"])) for name in names.split()]


TRAIN = "argparse textwrap zipfile shutil csv configparser http.client unittest.case"
MANY = (
    " ast asyncio.base_events bdb calendar cgitb codecs collections concurrent.futures.process ctypes dataclasses"
    " datetime difflib dis doctest email.message email.header enum fractions ftplib functools gettext gzip heapq"
    " html.parser http.cookiejar http.server imaplib inspect ipaddress json.decoder json.encoder logging"
    " logging.config logging.handlers mailbox mimetypes multiprocessing.pool multiprocessing.managers netrc"
    " numbers optparse os pathlib pdb pickle pickletools platform plistlib poplib pprint profile pydoc queue"
    " random sched selectors shelve smtplib socket socketserver sqlite3.dump ssl statistics string subprocess"
    " sysconfig tempfile timeit tokenize trace traceback types typing unittest.mock unittest.loader urllib.request"
    " urllib.parse urllib.robotparser uuid warnings wave weakref webbrowser xml.dom.minidom xml.etree.ElementTree"
    " xmlrpc.client zipapp"
)


def _rates(train: str, length: int, runs: dict[str, dict], **options) -> dict[str, float]:
    """Hits of the first 256 tokens of two modules; "learned" starts with what at most ``length`` tokens of each module
    of ``train`` taught a run with these options."""
    store(DEMO).reset()
    model, tokenizer = load(dtype=mx.float32, expert_slots=SLOTS, mtp=None, **options)
    with model:
        for text in _sources(train):
            process_prompt(tokenizer.encode(text)[:length], model, model.make_cache())
    kept = {kind: store(DEMO).find(kind).read_bytes() for kind in LEARNED if store(DEMO).find(kind)}
    rates = {}
    for name, options in runs.items():
        hits = misses = 0
        for text in _sources("tarfile threading"):
            store(DEMO).reset()
            if name == "learned":
                for kind, data in kept.items():
                    store(DEMO).paths[kind][0].write_bytes(data)
            ids = tokenizer.encode(text)[:257]
            with load_model(DEMO, mx.float32, expert_slots=SLOTS, mtp=None, **options)[0] as fresh:
                stats = score(fresh, [Passage(tuple(ids[:-1]), tuple(ids[1:]), 1)]).experts
            hits, misses = hits + stats.hits, misses + stats.misses
        rates[name] = hits / (hits + misses)
    print(json.dumps(rates))
    return rates


@pytest.mark.full
def test_a_restart_with_learned_usage_hits_more_often():
    """In the first 256 tokens of modules, after others: more than without usage, no less than without a history."""
    rates = _rates(TRAIN, 512, {"nothing": {"usage": False}, "empty": {}, "learned": {}})
    assert rates["learned"] > rates["nothing"] + 0.03 and rates["learned"] > rates["empty"] - 0.01


@pytest.mark.full
def test_a_restart_with_what_tokens_used_hits_ten_points_more_often():
    """After some 80,000 tokens; than with an empty history, with the same settings, on the same kind of text."""
    by_token = {"read_by_token": True}
    rates = _rates(TRAIN + MANY, 1024, {"empty": by_token, "learned": by_token}, **by_token)
    assert rates["learned"] > rates["empty"] + 0.10
