"""Candidates under test: each runs the checks in a thread of its own, and can be cancelled."""

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
    """One candidate under test, by the name that it has now."""

    def __init__(self, candidate: Candidate) -> None:
        self.candidate: Candidate | None = candidate
        self.cancelled = threading.Event()
        self.thread: threading.Thread | None = None


class CandidateTests:
    """The candidates under test. A context manager: at its end, all are cancelled and have ended."""

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
        """Test a candidate."""
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
        """A candidate was published: those that build on it are named without it, and others are cancelled."""
        for each in self._tests:
            if each.candidate is not None:
                each.candidate = after(tip, each.candidate) or None
                if each.candidate is None:
                    each.cancelled.set()

    def next(self, timeout: float) -> Tested | None:
        """The next result; None if there is none in this time. Raises the failure of a run that could not be made."""
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
