"""Worker processes of tests: a silent one tells where it is."""

from __future__ import annotations

import sys

import pytest

from tests.locks import workers
from tests.locks.workers import Line, Workers

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="the workers are forked")


def waits_for_ever(line: Line) -> None:
    line.say("ready")
    line.wait()


def test_the_stack_of_a_worker_that_says_nothing_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    with Workers() as started:
        worker = started.start(waits_for_ever)
        assert worker.hear() == "ready"
        monkeypatch.setattr(workers, "PATIENCE", 0.0)
        with pytest.raises(AssertionError, match="in waits_for_ever"):
            worker.hear()
