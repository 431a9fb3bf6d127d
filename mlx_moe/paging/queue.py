"""Threads that run pieces of jobs, demanded jobs first. Knows no files and no MLX.

A job is a few callables that belong together, as the reads of one record. It has ended when none of its pieces runs or
will run any more; only then is the memory that they write to the caller's again.

Reads must not wait for Python. A thread whose read has returned needs Python's lock before the next can start, and a
main thread that builds graphs gives it up only every switch interval (5 ms by default). So that interval is at most
``SWITCH_S`` while any queue has threads, and between two pieces a thread takes no other lock: pieces stand in deques,
whose methods are atomic, and wake-ups in ``SimpleQueue``, which waits outside of Python. Threads that wake while others
run Python get it one after another, some 0.2 ms each; so jobs that start together (``Together``) are all queued before
the first thread wakes, and then who queued them waits until the threads have begun.
"""

from __future__ import annotations

import copy
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from queue import SimpleQueue
from typing import Generic, Protocol, TypeVar

Piece = Callable[[], object]

SWITCH_S = 0.00002
"""Of Python's switch interval."""
BEGIN_S = 0.002
"""The longest that jobs that start together are waited for to begin; threads may have something else to do."""
SPECULATIVE_THREADS = 8
"""At most so many run speculative jobs, whose reads take bandwidth from demanded ones."""
MANY_JOBS = 256
"""With more than these on its list a queue forgets those that have ended."""


def for_any(threads: int) -> int:
    """How many of so many threads run any job; the others run demanded ones only, which so seldom wait for others."""
    return threads - max(threads // 4, threads - SPECULATIVE_THREADS)


class Cancelled(Exception):
    """The job was cancelled before all of its pieces had run."""


class Job:
    """Pieces under way; made by ``JobQueue.submit``."""

    def __init__(self, pieces: Iterable[Piece], check: Piece | None = None) -> None:
        self._pieces, self._check = list(pieces), check
        self._open = list(range(len(self._pieces)))  # an entry for each that has not ended; the last one is 0
        self._error: Exception | None = None
        self._over = threading.Lock()
        self.ended = not self._pieces
        if self._pieces:
            self._over.acquire()

    def wait(self) -> None:
        """Until it has ended; raises the first error of a piece, or Cancelled, or what its check raises."""
        with self._over:
            pass
        if self._error is not None:
            raise copy.copy(self._error)  # a traceback in the job's own would keep the caller's memory alive
        if self._check is not None:
            self._check()

    def _fail(self, error: Exception) -> None:
        """One of its pieces raised; those that have not begun do nothing."""
        error.__context__ = error.__cause__ = None  # their frames hold what the piece refers to
        self._error = self._error or error.with_traceback(None)

    def _drop(self) -> None:
        """One of its pieces will not run."""
        self._error = self._error or Cancelled()
        self._close()

    def _close(self) -> None:
        if self._open.pop() == 0:  # atomic, so one thread alone is the last
            self._end()

    def _end(self) -> None:
        self._pieces.clear()
        self.ended = True
        self._over.release()


class Together:
    """Demanded jobs that start at once, with ``JobQueue.go``; made by ``JobQueue.together``.

    Pieces that are never started so are still dropped by ``cancel`` and ``stop``.
    """

    def __init__(self, threads: int) -> None:
        self._threads, self._left = threads, []  # of the first pieces, one for each thread, those that have not begun
        self.pieces = 0
        self._begun = threading.Lock()
        self._begun.acquire()

    def entry(self, piece: Piece) -> Piece:
        """What to queue for one of their pieces."""
        self.pieces += 1
        if self.pieces > self._threads:
            return piece
        self._left.append(self.pieces)
        return partial(self._begin, piece)

    def wait(self) -> None:
        """Until as many pieces as there are threads have begun, if there are so many; not longer than ``BEGIN_S``."""
        if self.pieces:
            self._begun.acquire(timeout=BEGIN_S)

    def _begin(self, piece: Piece) -> object:
        if self._left.pop() == 1:  # atomic, so one thread alone is the last
            self._begun.release()
        return piece()


_Entry = tuple[Job, Piece]


class _Switching:
    """Holds the interpreter's switch interval down while somebody asks for it."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a finalizer may run in its holder
        self._users: set[_Threads] = set()
        self._earlier = 0.0

    def hold(self, user: _Threads) -> None:
        """Until that user's ``release``."""
        with self._lock:
            if not self._users:
                self._earlier = sys.getswitchinterval()
            self._users.add(user)
            sys.setswitchinterval(min(self._earlier, SWITCH_S))

    def release(self, user: _Threads) -> None:
        """The last one puts back what was there; who holds nothing releases nothing."""
        with self._lock:
            if user in self._users:
                self._users.remove(user)
                if not self._users:
                    sys.setswitchinterval(self._earlier)


_switching = _Switching()


class _Threads:
    """One start of a queue: its threads and what they take from. After ``stop`` it is of no further use."""

    def __init__(self, count: int, name: str) -> None:
        self._demanded: deque[_Entry] = deque()
        self._speculative: deque[_Entry] = deque()
        # Wake-ups, after which a thread takes pieces until there are none: other threads may be faster. False ends it.
        self._any: SimpleQueue[bool] = SimpleQueue()
        self._urgent: SimpleQueue[bool] = SimpleQueue()
        self._reserved = count - for_any(count)  # threads for demanded pieces alone
        self._threads: list[threading.Thread] = []  # that run; each enters itself
        self._jobs: list[Job] = []  # all that may not have ended
        self._count, self._name = count, name
        self.stopping = False  # and then of no further use

    def start(self) -> None:
        """Raises what interrupts it; ``stop`` then ends those that run."""
        _switching.hold(self)
        for i in range(self._count):
            mine = (self._urgent, (self._demanded,)) if i < self._reserved else None
            arguments = mine or (self._any, (self._demanded, self._speculative))
            thread = threading.Thread(
                target=_work, args=(self._threads, *arguments), name=f"{self._name}-{i}", daemon=True
            )
            thread.start()
            self._threads.append(thread)  # too: it may not have come to it when somebody stops it

    def add(self, job: Job, demanded: bool, together: Together | None) -> None:
        """Queue its pieces. together: and wake nobody."""
        if len(self._jobs) > MANY_JOBS:
            self._jobs = [one for one in self._jobs if not one.ended]
        self._jobs.append(job)
        entries = [(job, piece if together is None else together.entry(piece)) for piece in job._pieces]
        (self._demanded if demanded else self._speculative).extend(entries)
        if together is None:
            self.wake(len(entries), demanded)

    def promote(self, job: Job) -> None:
        """What waits of a speculative job goes behind the demanded ones."""
        moved = [entry for entry in list(self._speculative) if entry[0] is job and _taken(self._speculative, entry)]
        self._demanded.extend(moved)
        self.wake(len(moved), True)

    def cancel(self, job: Job) -> None:
        """What waits of it will not run."""
        for entries in (self._demanded, self._speculative):
            for entry in list(entries):
                if entry[0] is job and _taken(entries, entry):
                    job._drop()

    def stop(self) -> None:
        """Drop what has not started, end the threads; waits for what runs.

        Where an interrupt ended an earlier call of this, or took a piece that another was moving, nothing is left over.
        """
        self.stopping = True
        for entries in (self._demanded, self._speculative):
            while entries:
                try:
                    job, _ = entries.pop()
                except IndexError:  # a thread was faster
                    break
                job._drop()
        for i in range(self._count):
            (self._urgent if i < self._reserved else self._any).put(False)
        inside = threading.current_thread() in self._threads  # a finalizer may run in any
        for thread in list(self._threads):
            if thread is not threading.current_thread():
                thread.join()
        for job in self._jobs:
            if not (job.ended or inside):
                job._error = job._error or Cancelled()
                job._end()
        _switching.release(self)

    def wake(self, count: int, demanded: bool) -> None:
        """Threads, for so many pieces that were queued."""
        for _ in range(min(count, self._count - self._reserved)):
            self._any.put(True)
        for _ in range(min(count, self._reserved) if demanded else 0):
            self._urgent.put(True)


def _taken(entries: deque[_Entry], entry: _Entry) -> bool:
    """Whether it was still there, and is gone now."""
    try:
        entries.remove(entry)
    except ValueError:
        return False
    return True


def _work(threads: list[threading.Thread], wake: SimpleQueue[bool], sources: tuple[deque[_Entry], ...]) -> None:
    """A thread: after a wake-up, pieces of the first source that has one, until none has."""
    threads.append(threading.current_thread())
    while wake.get():
        while entries := next(filter(None, sources), None):
            try:
                job, piece = entries.popleft()
            except IndexError:  # another thread was faster
                continue
            if job._error is None:
                try:
                    piece()
                except Exception as failed:  # whatever it is, who waits for the job gets it
                    job._fail(failed)
            del piece  # memory that it refers to is the caller's once the job has ended
            job._close()
            del job


class Runs(Protocol):
    """What a ``Restarted`` queue runs with."""

    stopping: bool

    def start(self) -> None:
        """May raise, also what interrupts it; ``stop`` then ends what runs."""

    def stop(self) -> None:
        """Drop what has not started and wait for what runs; where an interrupt ended an earlier call, go on with it."""


T = TypeVar("T", bound=Runs)


class Restarted(Generic[T]):
    """A queue whose threads start with the first job and end with ``stop`` or with the queue."""

    def __init__(self, make: Callable[[], T]) -> None:
        """make: may not know the queue, which could never be forgotten then."""
        self._make = make
        self._now: list[T] = []  # at most one that may run
        self._finalizer = weakref.finalize(self, _stop, self._now)

    def stop(self) -> None:
        """Drop what has not started, wait for what runs, end the threads. A later job starts them again."""
        _stop(self._now)

    def _running(self) -> T:
        """For a new job."""
        if self._now and self._now[0].stopping:
            self.stop()  # which an interrupt ended early
        if not self._now:
            made = self._make()
            self._now.append(made)
            try:
                made.start()
            except BaseException:  # an interrupt, or no more threads: those that run end
                self.stop()
                raise
        return self._now[0]


def _stop(now: list[Runs]) -> None:
    while now:
        now[0].stop()
        now.pop()


class JobQueue(Restarted[_Threads]):
    """Runs jobs with some threads of Python."""

    def __init__(self, threads: int, name: str = "jobs") -> None:
        super().__init__(partial(_Threads, threads, name))
        self._count = threads

    def submit(
        self,
        pieces: Iterable[Piece],
        demanded: bool = True,
        check: Piece | None = None,
        together: Together | None = None,
    ) -> Job:
        """Run the pieces of a new job, before or after all others: demanded ones in their order, then the rest.

        Args:
            check: run by who waits for it, once all pieces have run; may raise.
            together: the job is demanded, and runs from ``go`` on.
        """
        job = Job(pieces, check)
        self._running().add(job, demanded or together is not None, together)
        return job

    def together(self) -> Together:
        """For ``submit`` and ``go``."""
        return Together(self._count)

    def go(self, together: Together) -> None:
        """Start what was submitted with it; returns when threads have begun, at most a moment later."""
        if self._now:
            self._now[0].wake(together.pieces, True)
            together.wait()

    def promote(self, job: Job) -> None:
        """A speculative job is demanded now."""
        if self._now:
            self._now[0].promote(job)

    def cancel(self, job: Job) -> None:
        """No further piece of it starts; those that run end first."""
        if self._now:
            self._now[0].cancel(job)
