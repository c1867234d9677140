"""A compiled Go program on the same ledger: it follows the specification and knows nothing else.

Without `go` these tests are skipped, and the end of the run lists them as NOT RUN HERE.
`test_other_programs` makes the same calls from Python, and runs the shell recipe in a real shell.
"""

from __future__ import annotations

import os
import select
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from holdfast.errors import LockTimeout, NodeLocked
from holdfast.locks.ledger_lock import LedgerLock
from proof.effort import rounds
from tests.ledger.ledgers import open_claims, open_ledger, raw_events
from tests.locks.workers import Line, Workers

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="the workers are forked")

SOURCE = Path(__file__).parent / "go/other_program.go"
ROUNDS = rounds(60, least=16)
BATCH = 12
"""Large enough that all events are synced at once."""

Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    go = shutil.which("go")
    if go is None:
        pytest.skip("go is not installed: the specification's recipe for Go was neither compiled nor run")
    made = tmp_path_factory.mktemp("go") / "other_program"
    own = {"GOFLAGS": "", "GOTOOLCHAIN": "local", "GOPROXY": "off", "CGO_ENABLED": "0"}
    if "HOME" not in os.environ:
        own["GOCACHE"] = str(made.parent / "cache")
    subprocess.run([go, "build", "-o", made, SOURCE], env={**os.environ, **own}, check=True)
    return made


@pytest.fixture
def start(program: Path, scratch: Path) -> Iterator[Start]:
    """A function that starts the program on the ledger of this test."""
    started: list[subprocess.Popen[str]] = []

    def begin(command: str, *arguments: str, root: Path = scratch) -> subprocess.Popen[str]:
        line = [str(program), command, str(root), *arguments]
        process = subprocess.Popen(line, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        started.append(process)
        return process

    yield begin
    for process in started:
        process.kill()
        process.communicate()


def says_nothing_for(process: subprocess.Popen[str], seconds: float) -> bool:
    assert process.stdout is not None
    return select.select([process.stdout], [], [], seconds)[0] == []


def heard(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def storm(root: Path, workers: Workers, start: Start, command: str) -> Counter[str]:
    """Append from Holdfast and from Go at once; return the number of events by type or agent."""
    open_ledger(root).append({"type": "first"})

    def ours(line: Line) -> None:
        claims = open_claims(root)
        for turn in range(ROUNDS):
            claims.ledger.append({"type": "ours"})
            if turn % 4 == 0:
                claims.ledger.append_many([{"type": "ours"}] * (BATCH if turn % 8 else 2))
            with claims.claim(f"1.{os.getpid()}", "me"):
                pass

    theirs = [start(command, f"go-{number}", str(ROUNDS), root=root) for number in range(2)]
    running = workers.start_many(2, ours)
    assert [each.wait() for each in running] == [0] * 2
    assert [each.wait() for each in theirs] == [0] * 2
    return Counter(str(event.get("agent", event["type"])) for event in raw_events(root))


EXPECTED = {
    "first": 1,
    "ours": 2 * (ROUNDS + sum(BATCH if turn % 8 else 2 for turn in range(0, ROUNDS, 4))),
    "lock_acquired": 2 * ROUNDS,
    "lock_released": 2 * ROUNDS,
    "go-0": ROUNDS,
    "go-1": ROUNDS,
}


@pytest.mark.req("LG-02", "LG-12", "LG-13", "LG-17")
def test_a_go_program_and_holdfast_append_to_one_ledger_and_nothing_is_lost(
    scratch: Path, workers: Workers, start: Start
) -> None:
    assert storm(scratch, workers, start, "append") == EXPECTED
    events = raw_events(scratch)
    for agent in ("go-0", "go-1"):
        assert [each["number"] for each in events if each.get("agent") == agent] == list(range(ROUNDS))
    assert len([*open_ledger(scratch).events()]) == len(events)
    assert not (scratch / "ledger/ledger.lock").exists()


def test_a_go_program_that_takes_no_lock_is_found(scratch: Path, workers: Workers, start: Start) -> None:
    """Planted bug: it renames over events of Holdfast, and the count shows the loss."""
    for turn in range(20):
        try:
            if storm(scratch / str(turn), workers, start, "careless") != EXPECTED:
                return
        except AssertionError:  # a gap, or a writer of Holdfast that no longer finds its event
            return
    raise AssertionError("nothing was lost in 20 rounds although half of the writers took no lock")


@pytest.mark.req("LG-02", "LG-04")
def test_the_locks_of_a_go_program_and_of_holdfast_exclude_each_other(scratch: Path, start: Start) -> None:
    ledger = open_ledger(scratch, timeout=0.05)
    ledger.append({"type": "first"})
    ours = LedgerLock(scratch / "ledger", "ours").acquire()
    other = start("hold", "go-agent")
    assert says_nothing_for(other, 0.2)
    ours.release()
    assert heard(other) == "held"
    with pytest.raises(LockTimeout, match=r"timeout waiting for lock.*go-agent"):
        ledger.append({"type": "too early"})
    with pytest.raises(LockTimeout):
        ledger.append_many([{"type": "too early"}] * BATCH)
    other.communicate("\n")
    assert other.returncode == 0
    assert ledger.append({"type": "now"}).sequence == 2


@pytest.mark.req("LG-06", "LG-08", "LG-15")
def test_a_go_program_sees_our_claims_and_their_end(scratch: Path, start: Start) -> None:
    claims = open_claims(scratch)
    with claims.claim("1.2", "ours") as held:
        assert heard(start("claimed", "1.2")) == "ours"
        held.extend()
        assert heard(start("claimed", "1.2")) == "ours"
        with pytest.raises(NodeLocked):
            claims.claim("1.2", "another")
    assert heard(start("claimed", "1.2")) == ""
