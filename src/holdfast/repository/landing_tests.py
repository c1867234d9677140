"""Candidates under test: each runs its checks in a separate thread, and can be cancelled."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Collection
from typing import NamedTuple, Self

from holdfast.repository.landing_checks import CheckRun
from holdfast.repository.landing_plan import Candidate, after

Run = Callable[[threading.Event], CheckRun | None]
"""Runs the checks of a candidate until the event is set; None if it has no checks."""


class Tested(NamedTuple):
    """The result of a candidate; `run` is None if there was nothing to check."""

    candidate: Candidate
    passed: bool
    run: CheckRun | None


class _Test:
    """A test of one candidate. `candidate` is its current name, or None once the test is cancelled."""

    def __init__(self, candidate: Candidate) -> None:
        self.candidate: Candidate | None = candidate
        self.cancelled = threading.Event()
        self.thread: threading.Thread | None = None


class CandidateTests:
    """The candidates under test. A context manager: on exit, it cancels all tests and waits for their end."""

    def __init__(self) -> None:
        self._tests: list[_Test] = []
        self._results: queue.SimpleQueue[tuple[_Test, CheckRun | BaseException | None]] = queue.SimpleQueue()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.keep(())
        for each in self._tests:
            if each.thread is not None:
                each.thread.join()

    def candidates(self) -> set[Candidate]:
        return {each.candidate for each in self._tests if each.candidate is not None}

    def start(self, candidate: Candidate, run: Run) -> None:
        """Start the test of a candidate."""
        test = _Test(candidate)

        def work() -> None:
            try:
                self._results.put((test, run(test.cancelled)))
            except BaseException as failure:  # raised again by `next`
                self._results.put((test, failure))

        test.thread = threading.Thread(target=work, name="holdfast-check", daemon=True)
        self._tests.append(test)
        test.thread.start()

    def keep(self, wanted: Collection[Candidate]) -> None:
        """Cancel the tests of all other candidates: their results would decide nothing."""
        for each in self._tests:
            if each.candidate is not None and each.candidate not in wanted:
                each.cancelled.set()
                each.candidate = None

    def advance(self, tip: Candidate) -> None:
        """Rename the candidates that are built on the published one, which is the new tip, and cancel the others."""
        for each in self._tests:
            if each.candidate is not None:
                each.candidate = after(tip, each.candidate) or None
                if each.candidate is None:
                    each.cancelled.set()

    def next(self, timeout: float) -> Tested | None:
        """The next result; None if it takes longer, or if a test was cancelled. Raises what the run has raised."""
        try:
            test, found = self._results.get(timeout=timeout)
        except queue.Empty:
            return None
        self._tests.remove(test)
        if test.candidate is None:
            return None
        if isinstance(found, BaseException):
            raise found
        if found is not None and found.passed is None:
            return None  # it was cancelled
        return Tested(test.candidate, found is None or bool(found.passed), found)
