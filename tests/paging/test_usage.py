"""What is learned of experts: counts that fade, blends, rankings, who leaves memory; and the file's format."""

from __future__ import annotations

import random
import struct
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest

from mlx_moe.paging.learning import SAVE_EVERY, Keeper, Learning
from mlx_moe.paging.policy import LayerPolicy
from mlx_moe.paging.usage import (
    HALF_LIFE,
    MAX_COUNT,
    MOST_TOKENS,
    PROFILE_TOKENS,
    RECENT_HALF_LIFE,
    LayerUsage,
    Usage,
    blend,
    learned,
)
from mlx_moe.paging.usage_file import decode, encode, most_bytes

MARK = "0123456789abcdef0123456789abcdef"
LAYERS, EXPERTS, K = 3, 11, 2


def some(seed: int = 0, layers: int = LAYERS) -> Usage:
    rng = np.random.default_rng(seed)
    order = tuple(tuple(rng.permutation(EXPERTS)[: rng.integers(EXPERTS + 1)].tolist()) for _ in range(layers))
    return Usage(rng.uniform(0, 900, (layers, EXPERTS)).astype(np.float32), order, int(rng.integers(1 << 40)))


def same(a: Usage, b: Usage) -> bool:
    return np.array_equal(a.counts, b.counts) and (a.order, a.tokens) == (b.order, b.tokens)


# Counts


def naive(tokens: list[list[int]], half_life: float) -> np.ndarray:
    """Each use counts half after ``half_life`` further tokens."""
    out = np.zeros(EXPERTS)
    for age, chosen in enumerate(reversed(tokens)):
        for expert in chosen:
            out[expert] += 0.5 ** (age / half_life)
    return out


@pytest.mark.parametrize("seed", range(10))
def test_counts_do_not_depend_on_how_tokens_are_grouped(seed):
    """One at a time, in windows or as a prompt: what every token's age makes of it."""
    rng = random.Random(seed)
    tokens = [rng.sample(range(EXPERTS), K) for _ in range(rng.randint(1, 400))]
    layer, at = LayerUsage(EXPERTS, None, K), 0
    while at < len(tokens):
        n = rng.choice((1, 1, 3, 8, 100))
        layer.add(np.array(tokens[at : at + n]))
        at += n
    assert layer.tokens == len(tokens)
    np.testing.assert_allclose(layer.own, naive(tokens, HALF_LIFE), rtol=1e-9)
    np.testing.assert_allclose(layer.fade, 0.5 ** (len(tokens) / HALF_LIFE), rtol=1e-9)
    np.testing.assert_allclose(layer._recent, naive(tokens, RECENT_HALF_LIFE), rtol=1e-9, atol=1e-12)


def test_a_count_never_grows_beyond_what_a_file_may_hold():
    layer = LayerUsage(2, None, 1)
    for _ in range(30):
        layer.add(np.zeros((HALF_LIFE, 1), dtype=np.int64))
    assert 0.98 * MAX_COUNT < layer.own[0] < MAX_COUNT and layer.own[1] == 0


def test_worth_is_history_at_first_and_follows_the_text():
    start = np.zeros(EXPERTS)
    start[[3, 4]] = 2000
    layer = LayerUsage(EXPERTS, start, K)
    assert np.argsort(layer.worth(range(EXPERTS)))[-2:].tolist() == [3, 4]
    for _ in range(60):
        layer.add(np.array([[0, 1]]))
    assert set(np.argsort(layer.worth(range(EXPERTS)))[-2:]) == {0, 1}, "the text at hand"
    for _ in range(40):
        layer.add(np.array([[5, 6], [6, 7]]))
    worth = layer.worth(range(EXPERTS))
    assert worth[6] > worth[3] > worth[8] == worth[9]


def test_learning_goes_on_from_what_was_known():
    before, tokens = some(1), [[0, 1], [1, 2]] * 300
    layers = [LayerUsage(EXPERTS, None, K) for _ in range(LAYERS)]
    layers[1].add(np.array(tokens))
    after = learned(before, layers, [[5], [6, 7], []], 600)
    np.testing.assert_array_equal(after.counts[[0, 2]], before.counts[[0, 2]])
    want = before.counts[1] * 0.5 ** (600 / HALF_LIFE) + naive(tokens, HALF_LIFE)
    np.testing.assert_allclose(after.counts[1], want, rtol=1e-6)
    assert after.order == ((5,), (6, 7), ()) and after.tokens == before.tokens + 600


def test_a_draft_layer_comes_and_goes():
    """Run without it, and what was known of it is not lost."""
    four = some(2, layers=4)
    after = learned(four, [LayerUsage(EXPERTS, None, K)] * 3, [[]] * 3, 1)
    assert np.array_equal(after.counts[3], four.counts[3]) and after.order[3] == four.order[3]
    more = learned(some(2), [LayerUsage(EXPERTS, None, K)] * 4, [[1]] * 4, 1)
    assert more.counts.shape == (4, EXPERTS) and not more.counts[3].any() and more.order[3] == (1,)


# What a model starts with


def test_usage_outweighs_a_profile_as_it_grows():
    profile = Usage(np.eye(EXPERTS, dtype=np.float32)[:1] * 1e9, ((),), 10)
    shares = []
    for tokens in (1, PROFILE_TOKENS, 20 * PROFILE_TOKENS):
        counts = np.zeros((1, EXPERTS), dtype=np.float32)
        counts[0, 4:6] = tokens
        seed = blend(Usage(counts, ((),), tokens), profile, 1, EXPERTS, K)
        assert seed.kind == "blend"
        shares.append(seed.counts[0, 4:6].sum() / seed.counts.sum())
    assert shares[0] < 0.01 and abs(shares[1] - 0.5) < 1e-6 and shares[2] > 0.95


def test_kinds_and_digests():
    usage, profile, nothing = some(3), some(4), Usage.none(LAYERS, EXPERTS)
    seeds = [
        blend(u, p, LAYERS, EXPERTS, K)
        for u, p in (
            (None, None),
            (nothing, nothing),
            (usage, None),
            (None, profile),
            (usage, profile),
            (profile, usage),
        )
    ]
    assert [s.kind for s in seeds] == ["empty", "empty", "usage", "profile", "blend", "blend"]
    digests = [s.digest for s in seeds]
    assert digests[:2] == [None, None] and len(set(digests[2:])) == 4 and all(len(d) == 16 for d in digests[2:])
    assert seeds[2].digest == blend(some(3), None, LAYERS, EXPERTS, K).digest
    other = Usage(usage.counts, (usage.order[1], *usage.order[1:]), usage.tokens)
    assert blend(other, None, LAYERS, EXPERTS, K).digest != seeds[2].digest, "the order decides too"


def test_ranking():
    counts = np.array([[5, 0, 5, 9, 0, 5, 1]], dtype=np.float32)
    seed = blend(Usage(counts, ((2, 6),), 1), None, 1, 7, 1)
    assert seed.ranking(0, 3) == [0, 2, 3], "used later, then lower numbers, go before"
    assert seed.ranking(0, 6) == [6, 5, 0, 2, 3], "what was never used is not read"
    assert sorted(seed.ranking(0, 7)) == list(range(7)) and seed.ranking(0, 7)[-3:] == [0, 2, 3]
    assert seed.ranking(0, 0) == []


# Who leaves


def test_least_worth_leaves_first_and_the_older_of_equals():
    worth = {0: 3.0, 1: 1.0, 2: 2.0, 3: 1.0, 4: 0.5}
    policy = LayerPolicy(4, rank=lambda experts: sorted(experts, key=worth.__getitem__))
    for a in policy.admit([0, 1, 2, 3]):
        policy.show(a.expert)
    policy.touch([3, 2, 1, 0])
    assert policy.experts == [3, 2, 1, 0] and policy.leaving == [3, 1, 2, 0]
    policy.use([3])
    assert [a.evicted for a in policy.admit([4])] == [1], "3 is pinned"
    worth[3] = 9.0
    policy.release()
    policy.show(4)
    assert policy.leaving == [4, 2, 0, 3]


@pytest.mark.parametrize("seed", range(30))
def test_equal_worth_is_least_recently_used(seed):
    rng = random.Random(seed)
    plain, level = LayerPolicy(5), LayerPolicy(5, rank=LayerUsage(12).leaving)
    for _ in range(60):
        window = rng.sample(range(12), 3)
        for policy in (plain, level):
            missing = policy.use(window)
            for a in policy.admit(missing):
                policy.show(a.expert)
            policy.touch(window)
            policy.release()
        assert plain.experts == level.experts and plain.counters == level.counters


# The file


def test_a_file_gives_back_what_it_holds():
    for seed in range(20):
        usage = some(seed, layers=1 + seed % 4)
        for kind in ("usage", "profile"):
            data = encode(kind, usage, MARK)
            assert len(data) <= most_bytes(len(usage.counts), EXPERTS)
            assert same(decode(data, kind, EXPERTS, MARK), usage)


def test_what_is_not_whole_is_found():
    """Truncated at every byte, longer, bytes at random: one ValueError, and nothing else."""
    data, rng = encode("usage", some(), MARK), random.Random(0)
    bad = [data[:n] for n in range(len(data))] + [data + b"\0", data + data, b"", bytes(len(data))]
    bad += [rng.randbytes(rng.randrange(300)) for _ in range(100)]
    for case in bad:
        with pytest.raises(ValueError, match=r"^it is|^it has"):
            decode(case, "usage", EXPERTS, MARK)


HEAD = struct.Struct("<8sIIIQ16s")


def head(layers: int = 1, experts: int = EXPERTS, kind: int = 0, mark: str = MARK, magic: bytes = b"MLXMOEU2") -> bytes:
    return HEAD.pack(magic, kind, layers, experts, 7, bytes.fromhex(mark))


ZEROS = np.zeros(EXPERTS, dtype="<f4").tobytes()
EMPTY = struct.pack("<H", 0)


def with_count(value: float) -> bytes:
    return head() + struct.pack("<f", value) + ZEROS[4:] + EMPTY


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (head(magic=b"MLXMOEU1") + ZEROS + EMPTY, "another version"),
        (head(mark=MARK[::-1]) + ZEROS + EMPTY, "another model"),
        (head(experts=EXPERTS + 1) + ZEROS + bytes(4) + EMPTY, "another model"),
        (head(kind=1) + ZEROS + EMPTY, "not a usage"),
        (head(kind=9) + ZEROS + EMPTY, "not a usage"),
        (head(layers=0xFFFFFFFF) + ZEROS + EMPTY, "too short"),
        (head(layers=2) + ZEROS + EMPTY, "too short"),
        (head() + ZEROS, "too short"),
        (head() + ZEROS + EMPTY + EMPTY, "too long"),
        (head() + ZEROS + EMPTY + b"\0", "half a number"),
        (head() + ZEROS + struct.pack("<H", 3), "too short"),
        (head() + ZEROS + struct.pack("<HHH", 2, 4, 4), "an expert twice"),
        (head() + ZEROS + struct.pack("<HH", 1, EXPERTS), "one that is not there"),
        (with_count(float("nan")), "not a number"),
        (with_count(float("inf")), "larger than can be"),
        (with_count(-1.0), "negative"),
        (with_count(MAX_COUNT * 1.1), "larger than can be"),
    ],
)
def test_hostile_content(body, message):
    with pytest.raises(ValueError, match=message):
        decode(body, "usage", EXPERTS, MARK)


# When it is saved


def test_the_keeper_saves_now_and_then_and_only_news():
    saved, layer = [], LayerUsage(EXPERTS, None, K)
    seed = blend(None, None, 1, EXPERTS, K)
    keeper = Keeper(Learning(seed, Usage.none(1, EXPERTS), saved.append, True), [layer], lambda: [[2, 1]])
    keeper.save()
    assert not saved, "nothing was learned"
    for _ in range(2 * SAVE_EVERY + 1):
        layer.add(np.array([[1, 2]]))
        keeper.tick()
    assert [u.tokens for u in saved] == [SAVE_EVERY, 2 * SAVE_EVERY]
    keeper.save()
    keeper.save()
    assert [u.tokens for u in saved] == [SAVE_EVERY, 2 * SAVE_EVERY, 2 * SAVE_EVERY + 1]
    assert saved[-1].order == ((2, 1),)
    forgetful = Keeper(Learning(seed, Usage.none(1, EXPERTS), None, True), [layer], lambda: [[2, 1]])
    forgetful.save()
    assert len(saved) == 3


def test_knows_no_mlx():
    code = "import sys, mlx_moe.paging.usage, mlx_moe.paging.policy, mlx_moe.paging.learning; "
    code += "assert not any(name.startswith('mlx.') for name in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_more_tokens_than_can_be():
    """They would not fit into the next file."""
    usage = Usage(np.ones((1, 4), dtype=np.float32), ((),), MOST_TOKENS)
    later = learned(usage, [LayerUsage(4)], [[]], 7)
    assert later.tokens == MOST_TOKENS and decode(encode("usage", later, MARK), "usage", 4, MARK).tokens == MOST_TOKENS
    with pytest.raises(ValueError, match="more tokens than can be"):
        decode(encode("usage", replace(usage, tokens=MOST_TOKENS + 1), MARK), "usage", 4, MARK)
