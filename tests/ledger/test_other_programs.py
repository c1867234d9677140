"""Other programs on the same ledger: they follow the specification's recipes and know nothing of Holdfast."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from holdfast.errors import LockTimeout, NodeLocked
from tests.ledger.ledgers import open_claims, open_ledger, raw_events
from tests.locks.workers import Line, Workers

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="the workers are forked")

SHELL = r"""
PROOF_DIR="$1"
LEDGER_DIR="$PROOF_DIR/ledger"
LOCK_FILE="$LEDGER_DIR/ledger.lock"
for ((i = 0; i < $2; i++)); do
    # 1. Acquire lock (simplified - production should use proper atomic creation)
    while ! mkdir "$LOCK_FILE" 2>/dev/null; do
        sleep 0.01
    done

    # 2. Get next sequence number
    NEXT_SEQ=$(ls "$LEDGER_DIR"/event-*.json 2>/dev/null | wc -l)
    NEXT_SEQ=$((NEXT_SEQ + 1))

    # 3. Write event to temp file
    TEMP_FILE=$(mktemp "$LEDGER_DIR/.event-XXXXX.tmp")
    echo '{"type":"custom_event","timestamp":"'$(date -u +%Y-%m-%dT%H:%M:%SZ)'"}' > "$TEMP_FILE"

    # 4. Atomic rename
    mv "$TEMP_FILE" "$LEDGER_DIR/event-$(printf '%06d' $NEXT_SEQ).json"

    # 5. Release lock
    rmdir "$LOCK_FILE"
done
"""
"""The specification's example for shell tools, in a loop."""

ROUNDS = 10


class GoProgram:
    """The specification's examples for Go, call by call: `O_CREAT|O_EXCL` every 10 ms, rename, remove."""

    def __init__(self, root: Path) -> None:
        self.ledger = root / "ledger"
        self.lock = self.ledger / "ledger.lock"

    def acquire(self, timeout: float = 60.0) -> None:
        deadline = time.monotonic() + timeout
        while True:
            try:
                fd = os.open(self.lock, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
            except FileExistsError:
                if time.monotonic() > deadline:
                    raise TimeoutError("timeout waiting for lock") from None
                time.sleep(0.01)
                continue
            meta = {"agent_id": "go-agent", "acquired_at": self.now()}
            os.write(fd, json.dumps(meta).encode() + b"\n")
            os.close(fd)
            return

    def release(self) -> None:
        os.remove(self.lock)

    def count(self) -> int:
        return len([name for name in os.listdir(self.ledger) if name.startswith("event-")])

    def append_if_sequence(self, event: dict[str, str], expected: int) -> bool:
        """Compare, write a temporary file, sync and rename, all under the lock."""
        self.acquire()
        try:
            if self.count() != expected:
                return False
            draft = self.ledger / f".event-{os.getpid()}.tmp"
            fd = os.open(draft, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
            os.write(fd, json.dumps(event, indent=2).encode())
            os.fsync(fd)
            os.close(fd)
            os.rename(draft, self.ledger / f"event-{expected + 1:06d}.json")
            return True
        finally:
            self.release()

    def safe_append(self, event: dict[str, str]) -> None:
        for _ in range(10_000):
            if self.append_if_sequence(event, self.count()):
                return
        raise AssertionError("max retries exceeded")

    def locks(self) -> dict[str, str]:
        """The owner of each node, by replaying all events; expired claims are left out."""
        locks: dict[str, dict[str, str]] = {}
        for number in range(1, self.count() + 1):
            event = json.loads((self.ledger / f"event-{number:06d}.json").read_bytes())
            if event["type"] == "lock_acquired":
                locks[event["node_id"]] = event
            elif event["type"] in ("lock_released", "lock_reaped"):
                del locks[event["node_id"]]
        return {node: each["owner"] for node, each in locks.items() if each["expires_at"] > self.now()}

    @staticmethod
    def now(ahead: float = 0.0) -> str:
        return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() + ahead))


@pytest.mark.req("LG-02", "LG-03", "LG-12", "LG-13", "LG-17")
def test_shell_tools_go_programs_and_holdfast_append_to_one_ledger(scratch: Path, workers: Workers) -> None:
    bash = shutil.which("bash")
    ledger = open_ledger(scratch)
    ledger.append({"type": "first"})

    def ours(line: Line) -> None:
        mine = open_claims(scratch)
        for turn in range(ROUNDS):
            mine.ledger.append({"type": "ours"})
            if turn % 3 == 0:
                mine.ledger.append_many([{"type": "ours"}] * 2)
            with mine.claim(f"1.{os.getpid()}", "me"):
                pass

    def go(line: Line) -> None:
        program = GoProgram(scratch)
        for _ in range(ROUNDS):
            program.safe_append({"type": "go", "timestamp": GoProgram.now()})

    command = [bash or "sh", "-c", SHELL, "tool", str(scratch), str(ROUNDS)]
    tools = [subprocess.Popen(command) for _ in range(2 if bash else 0)]
    running = workers.start_many(3, ours) + workers.start_many(2, go)
    assert [each.wait() for each in running] == [0] * 5
    assert [each.wait() for each in tools] == [0] * len(tools)
    counted = Counter(event["type"] for event in raw_events(scratch))
    batches = 2 * len(range(0, ROUNDS, 3))
    assert counted == {
        "first": 1,
        "ours": 3 * (ROUNDS + batches),
        "lock_acquired": 3 * ROUNDS,
        "lock_released": 3 * ROUNDS,
        "go": 2 * ROUNDS,
        **({"custom_event": len(tools) * ROUNDS} if tools else {}),
    }
    assert len([*ledger.events()]) == sum(counted.values())


@pytest.mark.req("LG-02", "LG-03")
@pytest.mark.parametrize("how", ["go", "shell"])
def test_a_lock_acquired_by_the_recipe_blocks_our_writers_but_not_our_readers(scratch: Path, how: str) -> None:
    open_ledger(scratch).append({"type": "first"})
    program = GoProgram(scratch)
    if how == "go":
        program.acquire()
    else:
        (scratch / "ledger/ledger.lock").mkdir()
    hasty = open_ledger(scratch, timeout=0.05)
    with pytest.raises(LockTimeout, match="timeout waiting for lock"):
        hasty.append({"type": "too early"})
    with pytest.raises(LockTimeout):
        hasty.append_many([{"type": "too early"}] * 2)
    assert hasty.sequence == 1
    (scratch / "ledger/ledger.lock").rmdir() if how == "shell" else program.release()
    assert hasty.append({"type": "now"}).sequence == 2


@pytest.mark.req("LG-06", "LG-08", "LG-15")
def test_a_go_program_and_holdfast_see_each_others_claims(scratch: Path) -> None:
    claims, program = open_claims(scratch), GoProgram(scratch)
    with claims.claim("1.2", "ours") as held:
        assert program.locks() == {"1.2": "ours"}
        held.extend()
        assert program.locks() == {"1.2": "ours"}
    assert program.locks() == {}
    taken = {"type": "lock_acquired", "timestamp": program.now(), "node_id": "1.3", "owner": "go-agent"}
    program.safe_append({**taken, "expires_at": program.now(60)})
    with pytest.raises(NodeLocked, match="go-agent"):
        claims.claim("1.3", "ours")
    ended = {"type": "lock_released", "timestamp": program.now(), "node_id": "1.3", "owner": "go-agent"}
    program.safe_append(ended)
    with claims.claim("1.3", "ours"):
        assert program.locks() == {"1.3": "ours"}


@pytest.mark.req("LG-05")
def test_the_lock_of_a_killed_writer_is_taken_over(scratch: Path, workers: Workers) -> None:
    ledger = open_ledger(scratch)
    ledger.append({"type": "first"})

    def hold(line: Line) -> None:
        from holdfast.locks.ledger_lock import LedgerLock

        LedgerLock(scratch / "ledger", "doomed").acquire()
        line.say("held")
        line.wait()

    doomed = workers.start(hold)
    assert doomed.hear() == "held"
    doomed.kill()
    doomed.wait()
    assert (scratch / "ledger/ledger.lock").exists()
    assert ledger.append({"type": "next"}).sequence == 2
