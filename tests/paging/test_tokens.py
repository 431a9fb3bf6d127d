"""What tokens used before is remembered and read ahead: shares, rows, files; output and counters in the engine."""

from __future__ import annotations

import math
import os
import random
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from disks import slow
from mlx_moe import MoceConfig, load_model
from mlx_moe.cli.usage import main as usage_verb
from mlx_moe.cli.usage import store_of
from mlx_moe.paging import learning, token_memory
from mlx_moe.paging.token_memory import DOUBT, LIKELY, ROWS, TokenMemory, width_of
from mlx_moe.paging.usage_file import most_bytes
from paging.streamed import EXPERTS, IDS, LAYERS, TOP_K, greedy, logits, write_model

MARK = "0123456789abcdef" * 2


@pytest.fixture(autouse=True)
def quick(monkeypatch) -> None:
    """One case is enough to be read ahead."""
    monkeypatch.setattr(token_memory, "DOUBT", 1)


@pytest.fixture
def memory() -> TokenMemory:
    return TokenMemory(2, 8, 2)


def add(memory: TokenMemory, token: int, *layers: tuple[int, int]) -> None:
    memory.add(np.array([token]), np.array([layers]))


# What is remembered


def test_what_a_token_used_in_most_cases_is_likely(memory):
    """Per layer, the likeliest first; few cases tell little."""
    assert memory.likely([5]) == [[], []] and memory.digest is None
    add(memory, 5, (1, 2), (7, 3))
    assert [sorted(row) for row in memory.likely([5])] == [[1, 2], [3, 7]]
    add(memory, 5, (1, 4), (7, 3))
    assert memory.likely([5]) == [[1], [3, 7]] or memory.likely([5]) == [[1], [7, 3]]
    add(memory, 5, (1, 2), (6, 3))
    assert memory.likely([5])[0] == [1, 2] and memory.likely([5])[1][0] == 3
    assert memory.likely([6]) == [[], []] and memory.known == 1


def test_few_cases_tell_little(memory, monkeypatch):
    monkeypatch.undo()
    enough = math.ceil(LIKELY * DOUBT / (1 - LIKELY))
    for _ in range(enough - 1):
        add(memory, 5, (1, 2), (3, 4))
    assert memory.likely([5]) == [[], []]
    add(memory, 5, (1, 2), (3, 4))
    assert [sorted(row) for row in memory.likely([5])] == [[1, 2], [3, 4]]


def test_several_tokens_of_a_window(memory):
    add(memory, 5, (1, 2), (3, 4))
    add(memory, 6, (2, 6), (3, 0))
    assert [sorted(row) for row in memory.likely([5, 6, 5])] == [[1, 2, 6], [0, 3, 4]]


@pytest.mark.parametrize("seed", range(4))
def test_shares_are_those_of_a_count(seed):
    """While no row is contested, no cell is, and nothing fades: counts of an oracle that keeps everything."""
    rng, memory, cases = np.random.default_rng(seed), TokenMemory(3, 3, 2), {}
    for _ in range(120):
        token, used = int(rng.integers(0, 9)), np.stack([rng.permutation(3)[:2] for _ in range(3)])
        memory.add(np.array([token]), used[None])
        cases.setdefault(token, []).append(used)
    assert max(map(len, cases.values())) < 32
    for token, seen in cases.items():
        n = len(seen)
        for layer in range(3):
            shares = {e: sum(e in used[layer] for used in seen) / (n + 1) for e in range(3)}
            clear = {e: share for e, share in shares.items() if abs(share - LIKELY) > 1e-4}
            got = memory.likely([token])[layer]
            assert {e for e in got if e in clear} == {e for e, share in clear.items() if share > LIKELY}
            assert [shares[e] for e in got] == pytest.approx(sorted((shares[e] for e in got), reverse=True), abs=1e-5)


def test_a_row_goes_to_who_is_seen_more(memory):
    """Others lower its count; when nothing is left, it is theirs."""
    for _ in range(2):
        add(memory, 5, (1, 2), (3, 4))
    add(memory, 5 + ROWS, (6, 7), (6, 7))
    assert sorted(memory.likely([5])[0]) == [1, 2] and memory.likely([5 + ROWS]) == [[], []]
    add(memory, 5 + ROWS, (6, 7), (6, 7))
    assert memory.likely([5]) == [[], []] and sorted(memory.likely([5 + ROWS])[0]) == [6, 7]
    assert memory.known == 1


def test_what_was_used_long_ago_fades():
    memory = TokenMemory(1, 40, 2)
    for used in [(1, 2)] * 40 + [(3, 4)] * 200:
        add(memory, 9, used)
    assert sorted(memory.likely([9])[0]) == [3, 4]


# Files


def filled(seed: int = 0) -> TokenMemory:
    rng, memory = np.random.default_rng(seed), TokenMemory(LAYERS, EXPERTS, TOP_K)
    tokens = rng.integers(0, 50, 300)
    ids = np.stack([[rng.permutation(EXPERTS)[:TOP_K] for _ in range(LAYERS)] for _ in tokens])
    ids[:, :, 0] = tokens[:, None] % EXPERTS
    memory.add(tokens, ids)
    return memory


def test_what_is_saved_is_what_is_read():
    memory = filled()
    data = memory.encode(MARK)
    assert len(data) <= TokenMemory.most_bytes(LAYERS, EXPERTS, TOP_K)
    again = TokenMemory.decode(data, LAYERS, EXPERTS, TOP_K, MARK)
    assert again.known == memory.known and again.encode(MARK) == data and again.digest == memory.digest
    assert any(any(row) for row in again.likely(range(50)))
    for token in range(50):
        assert [row[:1] for row in again.likely([token])] == [row[:1] for row in memory.likely([token])]


def _changed(data: bytes, at: int, new: bytes) -> bytes:
    return data[:at] + new + data[at + len(new) :]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda d: b"", "not a file of this format"),
        (lambda d: d[:30], "not a file of this format"),
        (lambda d: _changed(d, 7, b"9"), "another version"),
        (lambda d: _changed(d, 8, b"\x07"), "another model"),
        (lambda d: _changed(d, 24, b"\xff"), "another model"),
        (lambda d: _changed(d, 20, b"\xff\xff\xff\x7f"), "another length"),
        (lambda d: d + b"x", "another length"),
        (lambda d: _changed(d, 40, b"\xff\xff\xff\xff"), "a token is not one"),
        (lambda d: _changed(d, 44, d[40:44]), "has two rows"),
        (lambda d: _changed(d, 40 + 4 * filled().known, b"\0"), "a token is not one"),
        (lambda d: _changed(d, 40 + 5 * filled().known, b"\x28\0"), "an expert that is not there"),
    ],
)
def test_what_is_not_of_this_model_is_refused(change, reason):
    with pytest.raises(ValueError, match=reason):
        TokenMemory.decode(change(filled().encode(MARK)), LAYERS, EXPERTS, TOP_K, MARK)


def test_sizes():
    """A row has room for half as many again as a token uses; the published model's file is 9 MB at most."""
    assert [width_of(4, 40), width_of(10, 512), width_of(4, 5)] == [6, 15, 5]
    assert most_bytes(49, 512) < 1e6 < TokenMemory.most_bytes(48, 512, 10) < 9e6
    with pytest.raises(ValueError, match="65535 experts"):
        TokenMemory(1, 65535, 2)


# In the engine


@pytest.fixture
def path(tmp_path) -> Path:
    return write_model(tmp_path / "m.gguf", mtp=True)


def opened(path: Path, slots: int = 10, **options):
    return load_model(path, mx.float32, expert_slots=slots, **{"read_by_token": True} | options)[0]


def known(path: Path) -> TokenMemory | None:
    return store_of(path).read_tokens()


@pytest.fixture
def learned(path) -> Path:
    """A model that has seen IDS once."""
    with opened(path) as model:
        logits(model)
    return path


@pytest.mark.sample(1)
@pytest.mark.parametrize("threads", [1, 8])
@pytest.mark.parametrize("slots", [4, 7, 12, 30])
def test_logits_and_text_are_the_same(learned, monkeypatch, slots, threads):
    """Under random read times, after resizes too."""
    with load_model(learned, mx.float32, resident=True)[0] as model:
        want, text = logits(model), greedy(model)
    slow(monkeypatch, 0.001, seed=slots)
    with opened(learned, slots, io_threads=threads) as model:
        for size in (slots, 6 if slots > 6 else 20):
            model.resize_experts(size)
            assert np.array_equal(logits(model), want) and greedy(model) == text
        assert model.experts_stats.ahead_useful > 0


def test_what_a_token_used_is_in_memory_when_it_comes_again(learned):
    """More hits than without, of single tokens and windows, and none fewer in the first layer, which is never early."""
    found = {}
    for by_token in (False, True):
        with opened(learned, read_by_token=by_token, seed_residency="usage") as model:
            logits(model, (1,) * 20 + (4,) * 5)
            found[by_token] = model.experts_stats
    hits = {name: sum(stats.layer_hits[1:LAYERS]) for name, stats in found.items()}
    total = sum(found[True].layer_hits[1:LAYERS]) + sum(found[True].layer_misses[1:LAYERS])
    assert hits[True] > hits[False] + 0.1 * total


def test_residents_and_counters_follow_from_files_and_tokens(learned, tmp_path, monkeypatch):
    """With cache-aware routing output too: under random read times and one to eight threads all is the same."""
    kept = {file: file.read_bytes() for file in learned.parent.iterdir()}
    for moce in (None, MoceConfig(bonus=3.0)):
        found = []
        for threads, delay_s in ((8, 0.0), (1, 0.0005), (8, 0.003)):
            for file, data in kept.items():
                file.write_bytes(data)
            with (
                opened(learned, io_threads=threads, moce=moce, seed_residency="usage") as model,
                monkeypatch.context() as patch,
            ):
                slow(patch, delay_s, seed=threads)
                out, text = logits(model, (12, 1, 4, 1)), greedy(model, 3)
                stats = {k: v for k, v in model.experts_stats.as_dict().items() if not k.endswith("_ms")}
                present = [model._experts._pager.present(i) for i in range(LAYERS)]
                found.append((out.tobytes(), text, stats, present))
        assert found[0] == found[1] == found[2] and found[0][2]["ahead_useful"] > 20


@pytest.mark.sample(1)
@pytest.mark.parametrize("seed", range(3))
def test_interrupted_passes_leave_nothing(learned, seed):
    """Memory by token is what was accepted, and text goes on as if nothing had been."""
    with load_model(learned, mx.float32, resident=True)[0] as model:
        want = greedy(model, 4)
    rng = random.Random(seed)
    with opened(learned, 8) as model:
        by_token = model._experts._by_token
        for _ in range(6):
            cache, layer = model.make_cache(), rng.randrange(LAYERS)
            mx.eval(model(mx.array(IDS[None, :20]), cache=cache))
            model.begin(cache)
            model._experts.begin(mx.array([[1]]))  # keeps the prompt
            before, real = by_token._memory.encode(MARK), model._experts.moe

            def stop(i, *rest, layer=layer, real=real):
                if i == layer:
                    raise KeyboardInterrupt
                return real(i, *rest)

            model._experts.moe = stop
            with pytest.raises(KeyboardInterrupt):
                model(mx.array(IDS[None, 20:22]), cache=cache)
            model._experts.moe = real
            model._experts.abort()
            model._experts.begin(mx.array([[1]]))
            assert by_token._memory.encode(MARK) == before
            assert greedy(model, 4) == want


def test_only_accepted_tokens_teach(path):
    with opened(path) as model:
        cache = model.make_cache()
        mx.eval(model(mx.array(IDS[None, :20]), cache=cache))
        model.begin(cache)
        mx.eval(model(mx.array(IDS[None, 20:26]), cache=cache))
        model.commit(cache, 2)
    assert known(path).known == len(set(IDS[:22].tolist()))


def test_saved_now_and_then_and_forgotten_on_request(path, monkeypatch, capsys):
    monkeypatch.setattr(learning, "SAVE_TOKENS_EVERY", 16)
    with opened(path) as model:
        logits(model, (20, 1))
        assert known(path).known == len(set(IDS[:20].tolist()))
        digest = model.experts_stats.seed_hash
    with opened(path) as model:
        assert model.experts_stats.seed_hash not in (None, digest)
        both = model.experts_stats.seed_hash
    with opened(path, read_by_token=False) as model:
        assert model.experts_stats.seed_hash not in (None, both)
    usage_verb(["--model", str(path)])
    assert f"by token: {len(set(IDS[:21].tolist()))} of the vocabulary, {path}.tokens" in capsys.readouterr().out
    assert usage_verb(["--model", str(path), "--reset"]) == 0
    assert sorted(os.listdir(path.parent)) == [path.name]


@pytest.mark.parametrize(
    "options",
    [{"usage": False}, {"seed_residency": "empty"}, {"seed_residency": "profile"}, {"read_by_token": False}],
    ids=str,
)
def test_not_replaced_by_a_run_that_does_not_start_with_it(learned, options):
    before = store_of(learned).find("tokens").read_bytes()
    with opened(learned, **options) as model:
        logits(model, (20, 1))
    assert store_of(learned).find("tokens").read_bytes() == before


def test_a_damaged_file_costs_one_warning(learned, caplog):
    file = store_of(learned).find("tokens")
    file.write_bytes(file.read_bytes()[:-1] + b"?")
    with opened(learned) as model:
        logits(model, (20, 1))
    assert [r.message for r in caplog.records if str(file) in r.message] == [
        f"{file} is ignored: it is damaged; 'mlx-moe usage --reset' with the model deletes it"
    ]
    assert known(learned).known == len(set(IDS[:21].tolist())), "and is replaced"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"read_ahead": False}, "read_by_token reads ahead, which is off; leave out one of them"),
        ({"record_routing": "x"}, "record_routing and read_by_token were both given"),
    ],
)
def test_settings_that_cannot_be(path, options, message):
    with pytest.raises(ValueError, match=message):
        opened(path, **options)


def test_no_recording_later(path, tmp_path):
    with opened(path) as model, pytest.raises(ValueError, match="no replay could follow"):
        model.record_routing(tmp_path / "trace")
    assert not (tmp_path / "trace").exists()
