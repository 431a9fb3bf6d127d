"""Who stays in memory: against an independent model of the rules, over random traces with windows and read-ahead."""

from __future__ import annotations

import random
import subprocess
import sys

import pytest

from mlx_moe.paging.policy import LayerPolicy
from paging.lru_oracle import Oracle


@pytest.mark.parametrize("seed", range(200))
def test_against_the_oracle(seed):
    """Hits, misses, evictions and their order, read-ahead, and who stands where in the end."""
    rng = random.Random(seed)
    slots, experts, k = rng.randint(1, 24), rng.randint(4, 48), rng.randint(1, 4)
    mine, oracle, evicted = LayerPolicy(slots), Oracle(slots), []
    weights = [1 / (1 + e) for e in range(experts)]

    def load(admissions):
        evicted.extend(a.evicted for a in admissions if a.evicted is not None)

    for _ in range(rng.randint(20, 60)):
        for expert in sorted(mine.hidden):  # what was read ahead in an earlier pass
            mine.show(expert)
            oracle.show([expert])
        guess, most = rng.choices(range(experts), weights, k=rng.randint(0, 4)), rng.randint(0, slots // 4)
        guess = list(dict.fromkeys(guess))
        load(mine.ahead(guess, most))
        oracle.read_ahead(guess, most)
        rows = [rng.choices(range(experts), weights, k=k) for _ in range(rng.randint(1, 8))]
        window = list(dict.fromkeys(e for row in rows for e in row))
        todo = mine.use(window)
        assert todo == oracle.use(window)
        arrived = [e for e in todo if e in mine.hidden]
        todo = [e for e in todo if e not in arrived]
        for expert in arrived:
            mine.show(expert)
        oracle.show(arrived)
        while todo:
            if not mine.room():
                mine.release()
                oracle.pins = []
                if not mine.room():
                    break
            wave, todo = todo[: mine.room()], todo[mine.room() :]
            load(mine.admit(wave))
            oracle.insert(wave)
            for expert in wave:
                mine.show(expert)
            oracle.show(wave)
        kept = [e for row in rows[: rng.randint(0, len(rows))] for e in row]
        mine.touch(kept)
        mine.release()
        oracle.commit(kept)
        assert mine.experts == [entry[0] for entry in oracle.list] and evicted == oracle.log
    c = mine.counters
    assert (c.hits, c.misses, c.evictions) == (oracle.hits, oracle.misses, len(oracle.log))
    assert (c.ahead_useful, c.ahead_wasted) == (oracle.useful, oracle.wasted)
    places = [mine.place(e) for e in mine.experts]
    assert len(set(places)) == len(places) and set(places) <= set(range(slots))


def filled(slots: int, experts: list[int]) -> LayerPolicy:
    policy = LayerPolicy(slots)
    for admission in policy.admit(experts):
        policy.show(admission.expert)
    policy.touch(experts)
    return policy


def test_a_window_keeps_what_it_uses_until_it_is_committed():
    policy = filled(3, [1, 2, 3])
    assert policy.use([1, 4]) == [4] and policy.room() == 2
    assert [a.evicted for a in policy.admit([4])] == [2]
    policy.show(4)
    assert policy.room() == 1 and [a.evicted for a in policy.admit([5, 6])] == [3], "1 and 4 are pinned"
    policy.show(5)
    policy.release()
    assert [a.evicted for a in policy.admit([6])] == [5], "5 was loaded and never used"


def test_rejected_rows_leave_the_order_alone():
    policy = filled(3, [1, 2, 3])
    policy.use([1, 2])
    policy.touch([2])
    policy.release()
    assert policy.experts == [1, 3, 2]


def test_what_is_being_read_is_no_victim():
    policy = filled(2, [1, 2])
    assert [a.evicted for a in policy.ahead([3], 1)] == [1] and policy.hidden == {3}
    assert [a.evicted for a in policy.admit([4, 5])] == [2], "only one place is left"
    assert policy.ahead([6], 1) == []


def test_named_victims_go_in_their_order():
    policy = filled(4, [1, 2, 3, 4])
    policy.use([3])
    assert [a.evicted for a in policy.admit([5, 6], victims=[9, 3, 2])] == [3, 2]


def test_a_place_that_could_not_be_filled_is_free():
    policy = filled(2, [1])
    (admission,) = policy.ahead([2], 1)
    policy.forget(2)
    assert policy.hidden == frozenset() and policy.admit([7]) == [(7, admission.place, None)]
    assert policy.counters.evictions == policy.counters.ahead_wasted == 0


def test_no_slots():
    with pytest.raises(ValueError, match="a layer has 0 slots; needed: at least 1"):
        LayerPolicy(0)


def test_the_policy_loads_neither_mlx_nor_numpy():
    code = "import sys, mlx_moe.paging.policy; assert not {'mlx.core', 'numpy'} & sys.modules.keys()"
    subprocess.run([sys.executable, "-c", code], check=True)
