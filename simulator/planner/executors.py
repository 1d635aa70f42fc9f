"""Where many independent evaluations run: here, in local processes, or on a Dask cluster.

Every executor takes (key, task) pairs and yields (key, result) pairs as they come, each key once,
in any order. A worker that dies costs time but no task: what it had is run again. What the function
raises is raised to the caller.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from importlib import import_module
from itertools import islice
from multiprocessing import get_context
from typing import Any, Protocol, TypeVar

from simulator.errors import Problem, UserError

Task = TypeVar("Task")
Result = TypeVar("Result")

#: Tasks handed out ahead of each worker: enough to keep it busy, few enough to stop soon.
_AHEAD = 3
#: A task that was running each time a worker died is given up after so many deaths.
_MAX_DEATHS = 3


class Executor(Protocol):
    """Runs a function on many tasks. The function must be importable by name (workers load it)."""

    def run(
        self, function: Callable[[Task], Result], tasks: Iterable[tuple[int, Task]]
    ) -> Iterator[tuple[int, Result]]:
        """Yield (key, result) for every (key, task), as they are done."""
        ...


@dataclass(frozen=True)
class Here:
    """One after another in this process."""

    def run(
        self, function: Callable[[Task], Result], tasks: Iterable[tuple[int, Task]]
    ) -> Iterator[tuple[int, Result]]:
        """Yield results in the order of the tasks."""
        for key, task in tasks:
            yield key, function(task)


def _ignore_interrupts() -> None:
    """Ctrl-C reaches the whole process group; only the parent acts on it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


@dataclass(frozen=True)
class LocalProcesses:
    """Worker processes on this machine; ``workers`` of them (None: one per core)."""

    workers: int | None = None

    def run(
        self, function: Callable[[Task], Result], tasks: Iterable[tuple[int, Task]]
    ) -> Iterator[tuple[int, Result]]:
        """Yield results as they come; new workers replace those that die.

        Raises:
            RuntimeError: workers die again and again on the same tasks.
        """
        count = self.workers or os.cpu_count() or 1
        source = iter(tasks)
        again: list[tuple[int, Task]] = []
        deaths = 0
        while True:
            pool = _Pool(count, function, again)
            try:
                for pair in pool.results(source):
                    deaths = 0
                    yield pair
                return
            except BrokenProcessPool:
                deaths += 1
                if deaths >= _MAX_DEATHS:
                    keys = ", ".join(str(key) for key, _ in pool.unfinished()[:8])
                    raise RuntimeError(
                        f"worker processes died {deaths} times in a row on tasks {keys} "
                        "(out of memory?)"
                    ) from None
                again = pool.unfinished()
            finally:
                pool.close()


@dataclass
class _Pool:
    """One pool of processes and what it has been given and not yet brought back."""

    count: int
    function: Callable[[Any], Any]
    first: list[tuple[int, Any]]
    pending: dict[Future[Any], tuple[int, Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.pool = ProcessPoolExecutor(
            self.count, mp_context=get_context("spawn"), initializer=_ignore_interrupts
        )

    def results(self, source: Iterator[tuple[int, Any]]) -> Iterator[tuple[int, Any]]:
        """Keep a few tasks ahead of each worker; yield what is done."""
        self._refill(source)
        while self.pending:
            done, _ = wait(self.pending, return_when=FIRST_COMPLETED)
            finished = [f for f in done if not isinstance(f.exception(), BrokenProcessPool)]
            for future in finished:
                key, _ = self.pending.pop(future)
                yield key, future.result()
            if len(finished) < len(done):
                raise BrokenProcessPool("a worker died")
            self._refill(source)

    def _refill(self, source: Iterator[tuple[int, Any]]) -> None:
        while len(self.pending) < self.count * _AHEAD:
            # Taken back from a pool that died first; only submitted tasks leave the list.
            task = self.first[0] if self.first else next(source, None)
            if task is None:
                return
            if not self.first:
                self.first.append(task)
            self.pending[self.pool.submit(self.function, task[1])] = task
            self.first.pop(0)

    def unfinished(self) -> list[tuple[int, Any]]:
        """Tasks without a result, in the order of their keys."""
        return sorted([*self.pending.values(), *self.first], key=lambda task: task[0])

    def close(self) -> None:
        """Stop without waiting for what is running."""
        for future in self.pending:
            future.cancel()
        self.pool.shutdown(wait=False, cancel_futures=True)


@dataclass(frozen=True)
class DaskCluster:
    """A Dask scheduler by address (``tcp://host:port``), from the extra ``dask``.

    Workers need this package installed. Dask runs the tasks of a lost worker again.
    """

    address: str
    timeout_s: float = 10.0

    def run(
        self, function: Callable[[Task], Result], tasks: Iterable[tuple[int, Task]]
    ) -> Iterator[tuple[int, Result]]:
        """Yield results as they come.

        Raises:
            UserError: ``distributed`` isn't installed or the scheduler can't be reached.
        """
        try:
            # Untyped, and not a dependency: imported by name.
            dask: Any = import_module("distributed")
        except ImportError:
            raise UserError(
                Problem("--dask", "needs the extra dask", "pip install 'gpumix[dask]'")
            ) from None
        try:
            client = dask.Client(self.address, timeout=self.timeout_s, set_as_default=False)
        except (OSError, TimeoutError, ValueError) as error:
            raise UserError(
                Problem("--dask", f"no scheduler at {self.address}: {error}", "tcp://host:8786")
            ) from None
        source = iter(tasks)
        keys: dict[Any, int] = {}

        def submit(key: int, task: Any) -> Any:
            future = client.submit(function, task, pure=False)
            keys[future.key] = key
            return future

        try:
            ahead = _AHEAD * max(sum(client.nthreads().values()), 1)
            first = [submit(*pair) for pair in islice(source, ahead)]
            waiting = dask.as_completed(first, loop=client.loop)
            for future in waiting:
                yield keys.pop(future.key), future.result()
                for pair in islice(source, 1):
                    waiting.add(submit(*pair))
        finally:
            client.close()
