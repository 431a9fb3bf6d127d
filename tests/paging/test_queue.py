"""Jobs and their threads: what is demanded goes first, errors reach who waits, nothing is left behind."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import time
import weakref

import pytest

from mlx_moe.paging.queue import BEGIN_S, MANY_JOBS, SPECULATIVE_THREADS, SWITCH_S, Cancelled, JobQueue
from waiting import soon


class Gate:
    """A piece that runs until it is opened."""

    def __init__(self):
        self.started, self.open = threading.Event(), threading.Event()

    def __call__(self) -> None:
        self.started.set()
        assert self.open.wait(10)


@pytest.fixture
def queue():
    queue = JobQueue(1, "queue")
    yield queue
    queue.stop()
    assert not threads()


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("queue")]


def blocked(queue: JobQueue) -> Gate:
    """The queue's only thread is busy."""
    gate = Gate()
    queue.submit([gate])
    assert gate.started.wait(10)
    return gate


def test_demanded_jobs_go_first(queue):
    done, gate = [], blocked(queue)
    late = [queue.submit([lambda i=i: done.append(i)], demanded=False) for i in (1, 2, 3)]
    first = [queue.submit([lambda i=i: done.append(i)]) for i in (4, 5)]
    queue.promote(late[2])
    queue.promote(first[0])
    gate.open.set()
    for job in (*late, *first):
        job.wait()
    assert done == [4, 5, 3, 1, 2]


def test_cancelled_jobs_do_not_start(queue):
    done, gate = [], blocked(queue)
    job = queue.submit([lambda: done.append(1)], demanded=False)
    queue.cancel(job)
    assert job.ended
    with pytest.raises(Cancelled):
        job.wait()
    gate.open.set()
    queue.submit([lambda: done.append(2)]).wait()
    assert done == [2]


def test_a_job_that_runs_ends_before_its_cancellation(queue):
    """Its memory is the caller's only then."""
    done, gate = [], Gate()
    job = queue.submit([gate, lambda: done.append(1)])
    assert gate.started.wait(10)
    queue.cancel(job)
    assert not job.ended
    gate.open.set()
    with pytest.raises(Cancelled):
        job.wait()
    assert not done


def test_the_first_error_reaches_everyone_who_waits(queue):
    def fail():
        raise OSError("bad sector")

    done = []
    job = queue.submit([fail, lambda: done.append(1)])
    for _ in range(2):
        with pytest.raises(OSError, match="bad sector"):
            job.wait()
    assert not done
    queue.submit([lambda: done.append(2)]).wait()
    assert done == [2], "the thread goes on"


@pytest.mark.parametrize("count", [1, 3, 4, 9])
def test_jobs_that_start_together(count):
    """Nothing runs before ``go``, which returns when each thread has begun; all of them run."""
    queue, done, gate = JobQueue(4, "queue"), [], threading.Event()
    together = queue.together()

    def piece(i: int) -> None:
        done.append(i)
        assert gate.wait(10)

    jobs = [queue.submit([lambda i=i: piece(i)], together=together) for i in range(count)]
    time.sleep(0.02)
    assert not done
    queue.go(together)
    assert soon(lambda: len(done) == min(count, 4)), "a busy machine may take longer than go waits"
    assert sorted(done) == list(range(min(count, 4)))
    gate.set()
    for job in jobs:
        job.wait()
    assert sorted(done) == list(range(count))
    queue.stop()


@pytest.mark.parametrize(("count", "speculative"), [(1, 1), (4, 3), (8, 6), (20, SPECULATIVE_THREADS)])
def test_threads_for_demanded_jobs_alone(count, speculative):
    """All others may be busy with speculative ones; every thread takes demanded ones."""
    queue, gates = JobQueue(count, "queue"), [Gate() for _ in range(2 * count)]
    jobs = [queue.submit([gate], demanded=False) for gate in gates[:count]]
    assert soon(lambda: sum(gate.started.is_set() for gate in gates) == speculative)
    jobs += [queue.submit([gate]) for gate in gates[count:]]
    assert soon(lambda: sum(gate.started.is_set() for gate in gates) == count)
    time.sleep(0.02)
    assert [sum(gate.started.is_set() for gate in some) for some in (gates[:count], gates[count:])] == [
        speculative,
        count - speculative,
    ]
    for gate in gates:
        gate.open.set()
    for job in jobs:
        job.wait()
    queue.stop()


def test_go_does_not_wait_for_threads_that_are_busy(queue):
    gate, together, done = blocked(queue), queue.together(), []
    job = queue.submit([lambda: done.append(1)], together=together)
    start = time.perf_counter()
    queue.go(together)
    spent = time.perf_counter() - start
    assert not done and BEGIN_S / 2 < spent < 1
    gate.open.set()
    job.wait()
    assert done == [1]


def test_nothing_waits_for_jobs_that_never_started(queue):
    """An interrupt may come between ``submit`` and ``go``; then they are cancelled, or the queue stops."""
    together, done = queue.together(), []
    jobs = [queue.submit([lambda: done.append(1)] * 2, together=together) for _ in range(2)]
    queue.cancel(jobs[0])
    queue.stop()
    for job in jobs:
        with pytest.raises(Cancelled):
            job.wait()
    queue.go(together)
    queue.submit([lambda: done.append(2)]).wait()
    assert done == [2]


def test_jobs_without_pieces_have_ended(queue):
    queue.submit([]).wait()


def test_stopping_drops_what_waits_and_a_later_job_starts_anew(queue):
    done, gate = [], blocked(queue)
    job = queue.submit([lambda: done.append(1)])
    threading.Timer(0.05, gate.open.set).start()
    queue.stop()
    assert job.ended and not done and not threads()
    queue.submit([lambda: done.append(2)]).wait()
    assert done == [2]


def test_a_share_of_the_threads_waits_for_demanded_jobs():
    queue, gates = JobQueue(4, "queue"), [Gate() for _ in range(4)]
    jobs = [queue.submit([gate], demanded=False) for gate in gates]
    assert all(gate.started.wait(10) for gate in gates[:3]) and not gates[3].started.wait(0.05)
    queue.submit([lambda: None]).wait()
    for gate in gates:
        gate.open.set()
    for job in jobs:
        job.wait()
    queue.stop()


def test_a_forgotten_queue_ends_its_threads():
    queue = JobQueue(3, "queue")
    queue.submit([lambda: None]).wait()
    assert len(threads()) == 3
    del queue
    gc.collect()
    assert not threads()


def test_pieces_are_forgotten_once_they_have_run(queue):
    """What they refer to may be large."""

    class Memory:
        pass

    memory = Memory()
    alive = threading.Event()
    weakref.finalize(memory, alive.set)
    queue.submit([lambda memory=memory: None]).wait()
    del memory
    queue.submit([lambda: None]).wait()
    gc.collect()
    assert alive.is_set()


def test_the_queue_loads_no_mlx():
    code = "import sys, mlx_moe.paging.queue; assert not {'mlx.core', 'numpy'} & sys.modules.keys()"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_an_interrupt_while_threads_start(queue, monkeypatch):
    """The thread that was being started may run or not; nothing is lost or joined too early."""
    start = threading.Thread.start

    def interrupted(thread):
        start(thread)
        raise KeyboardInterrupt

    monkeypatch.setattr(threading.Thread, "start", interrupted)
    with pytest.raises(KeyboardInterrupt):
        queue.submit([lambda: None])
    queue.stop()
    monkeypatch.undo()
    done = []
    queue.submit([lambda: done.append(1)]).wait()
    assert done == [1]


def test_an_interrupted_stop_goes_on_with_the_next_job(queue, monkeypatch):
    """Threads that were told to end take no further job."""
    queue.submit([int]).wait()

    def interrupted(thread):
        raise KeyboardInterrupt

    monkeypatch.setattr(threading.Thread, "join", interrupted)
    with pytest.raises(KeyboardInterrupt):
        queue.stop()
    monkeypatch.undo()
    done = []
    queue.submit([lambda: done.append(1)]).wait()
    assert done == [1]


@pytest.mark.parametrize("call", ["promote", "cancel"])
def test_a_piece_that_an_interrupt_lost_ends_with_stop(queue, monkeypatch, call):
    gate = blocked(queue)
    job = queue.submit([int, int], demanded=False)

    def interrupted(entries, entry):
        entries.remove(entry)
        raise KeyboardInterrupt

    monkeypatch.setattr("mlx_moe.paging.queue._taken", interrupted)
    with pytest.raises(KeyboardInterrupt):
        getattr(queue, call)(job)
    gate.open.set()
    queue.stop()
    assert job.ended
    with pytest.raises(Cancelled):
        job.wait()


def test_nothing_piles_up(queue):
    """Neither wake-ups of threads that there are not, nor jobs that have ended."""
    for _ in range(3 * MANY_JOBS):
        queue.submit([int, int]).wait()
    assert queue._now[0]._urgent.empty() and len(queue._now[0]._jobs) <= MANY_JOBS + 1


def test_errors_hold_nothing_of_what_failed(queue):
    """A caller that keeps one must not keep the memory that was read into."""

    class Memory:
        pass

    memory = Memory()
    gone = weakref.ref(memory)

    def fail(memory=memory):
        try:
            raise OSError("bad sector")
        except OSError:
            raise OSError("x cannot be read") from None

    job = queue.submit([fail])
    del memory, fail
    with pytest.raises(OSError, match="x cannot") as error:
        job.wait()
    queue.submit([int]).wait()
    assert gone() is None and error.value.__context__ is None


def test_switch_interval_is_short_while_threads_run_and_then_as_it_was():
    first, second, before = JobQueue(1, "queue"), JobQueue(1, "queue"), sys.getswitchinterval()
    try:
        sys.setswitchinterval(0.004)
        first.submit([int]).wait()
        second.submit([int]).wait()
        assert sys.getswitchinterval() == pytest.approx(SWITCH_S, abs=2e-6)
        first.stop()
        first.stop()
        assert sys.getswitchinterval() == pytest.approx(SWITCH_S, abs=2e-6)
        del second
        gc.collect()
        assert sys.getswitchinterval() == pytest.approx(0.004, abs=2e-6)
        sys.setswitchinterval(SWITCH_S / 10)
        first.submit([int]).wait()
        assert sys.getswitchinterval() == pytest.approx(SWITCH_S / 10, abs=2e-6), "made longer"
        first.stop()
    finally:
        sys.setswitchinterval(before)
