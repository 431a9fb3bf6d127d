"""Threads that run pieces of jobs, demanded jobs first. Knows no files and no MLX.

A job is a few callables that belong together, as the reads of one record. It has ended when none of its pieces runs or
will run any more; only then is the memory that they write to the caller's again.

While any queue has threads, Python's switch interval is ``SWITCH_S`` at most: a thread whose read has returned must get
Python's lock before the next read starts, and one that builds graphs gives it up only that often.
"""

from __future__ import annotations

import copy
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable

Piece = Callable[[], object]

SWITCH_S = 0.0005
"""Ten times as often as Python's default. Beside a main thread that builds graphs reads were 3 to 4 times as fast."""


class Cancelled(Exception):
    """The job was cancelled before all of its pieces had run."""


class Job:
    """Pieces under way; made by ``JobQueue.submit``."""

    def __init__(self, pieces: Iterable[Piece]) -> None:
        self._waiting = deque(pieces)
        self._running = 0
        self._error: Exception | None = None
        self._ended = threading.Event()

    @property
    def ended(self) -> bool:
        """Whether nothing of it runs or will run."""
        return self._ended.is_set()

    def wait(self) -> None:
        """Until it has ended; raises the first error of a piece, or Cancelled."""
        self._ended.wait()
        if self._error is not None:
            raise copy.copy(self._error)  # a traceback in the job's own would keep the caller's memory alive

    # The rest is called with the queue's lock held.

    def _take(self) -> Piece:
        self._running += 1
        return self._waiting.popleft()

    def _finish(self, error: Exception | None) -> None:
        self._running -= 1
        if error is not None:
            self._drop(error)
        self._close_if_over()

    def _drop(self, error: Exception) -> None:
        """No further piece starts."""
        self._waiting.clear()
        self._error = self._error or error

    def _close_if_over(self) -> None:
        if not self._running and not self._waiting:
            self._ended.set()


class _Switching:
    """Holds the interpreter's switch interval down while somebody asks for it."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a finalizer may run in its holder
        self._users: set[_State] = set()
        self._earlier = 0.0

    def hold(self, user: _State) -> None:
        """Until that user's ``release``."""
        with self._lock:
            if not self._users:
                self._earlier = sys.getswitchinterval()
            self._users.add(user)
            sys.setswitchinterval(min(self._earlier, SWITCH_S))

    def release(self, user: _State) -> None:
        """The last one puts back what was there; who holds nothing releases nothing."""
        with self._lock:
            if user in self._users:
                self._users.remove(user)
                if not self._users:
                    sys.setswitchinterval(self._earlier)


_switching = _Switching()


class _State:
    """What the threads share with the queue. They hold no reference to the queue, so that it can be forgotten."""

    def __init__(self) -> None:
        self.condition = threading.Condition()
        self.demanded: deque[Job] = deque()
        self.speculative: deque[Job] = deque()
        self.threads: list[threading.Thread] = []  # that were started; one whose start was interrupted enters itself
        self.started = False
        self.generation = 0  # threads of an earlier one end

    def enter(self, generation: int) -> bool:
        """The calling thread is one of those that run; False when it comes too late."""
        with self.condition:
            if self.generation != generation:
                return False
            if threading.current_thread() not in self.threads:
                self.threads.append(threading.current_thread())
            return True

    def next(self, generation: int, demanded_only: bool) -> tuple[Job, Piece] | None:
        """The next piece to run, waited for; None when threads of this generation are to end."""
        with self.condition:
            while self.generation == generation:
                for jobs in (self.demanded, self.speculative)[: 1 if demanded_only else 2]:
                    while jobs:
                        if jobs[0]._waiting:
                            return jobs[0], jobs[0]._take()
                        jobs.popleft()
                self.condition.wait()
            return None

    def stop(self) -> None:
        """Drop what has not started, and end the threads; waits for what runs."""
        with self.condition:
            for job in (*self.demanded, *self.speculative):
                if job._waiting:
                    job._drop(Cancelled())
                    job._close_if_over()
            self.demanded.clear()
            self.speculative.clear()
            self.end()
        for thread in list(self.threads):
            if thread is not threading.current_thread():  # a finalizer may run in any
                thread.join()
            with self.condition:
                if thread in self.threads:
                    self.threads.remove(thread)

    def end(self) -> None:
        """Threads end when they have run what they run. With the lock held."""
        _switching.release(self)
        self.started = False
        self.generation += 1
        self.condition.notify_all()


class JobQueue:
    """Runs jobs with some threads, which start with the first job and end with ``stop`` or with the queue."""

    def __init__(self, threads: int, name: str = "jobs") -> None:
        """A quarter of the threads runs demanded jobs only, so that one of those seldom waits for another kind."""
        self._count, self._name = threads, name
        self._state = _State()
        self._finalizer = weakref.finalize(self, _State.stop, self._state)

    def submit(self, pieces: Iterable[Piece], demanded: bool = True) -> Job:
        """Run the pieces of a new job, before or after all others: demanded ones in their order, then the rest."""
        job, state = Job(pieces), self._state
        with state.condition:
            if not state.started:
                self._start()
            (state.demanded if demanded else state.speculative).append(job)
            job._close_if_over()
            state.condition.notify_all()
        return job

    def promote(self, job: Job) -> None:
        """A speculative job is demanded now."""
        state = self._state
        with state.condition:
            if job in state.speculative:
                state.speculative.remove(job)
                state.demanded.append(job)
                state.condition.notify_all()

    def cancel(self, job: Job) -> None:
        """No further piece of it starts; those that run end first."""
        with self._state.condition:
            if job._waiting:
                job._drop(Cancelled())
                job._close_if_over()

    def stop(self) -> None:
        """Drop what has not started, wait for what runs, end the threads. A later job starts them again."""
        self._state.stop()

    def _start(self) -> None:
        state = self._state
        state.started = True
        try:
            _switching.hold(state)
            for i in range(self._count):
                arguments = state, state.generation, i < self._count // 4
                thread = threading.Thread(target=_work, args=arguments, name=f"{self._name}-{i}", daemon=True)
                thread.start()
                state.threads.append(thread)
        except BaseException:  # an interrupt, or no more threads: those that run end
            state.end()
            raise


def _work(state: _State, generation: int, demanded_only: bool) -> None:
    if not state.enter(generation):
        return
    while (taken := state.next(generation, demanded_only)) is not None:
        job, piece = taken
        error = None
        try:
            piece()
        except Exception as failed:  # whatever it is, who waits for the job gets it
            error = failed.with_traceback(None)
        with state.condition:
            job._finish(error)
        del job, piece, taken, error  # memory that they refer to is the caller's now
