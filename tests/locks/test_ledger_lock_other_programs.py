"""The write lock of a ledger and other programs that follow its protocol exclude each other."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from holdfast.errors import LockTimeout
from tests.locks.ledger_locks import (
    count_up,
    is_held,
    observer,
    waiting_lock,
)
from tests.locks.workers import Line, Workers, wait_until

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="there is no fork on Windows")


@pytest.fixture
def ledger(scratch: Path) -> Path:
    (scratch / "ledger").mkdir()
    return scratch / "ledger"


# --- Another program, as specified -----------------------------------------------------------------------


def foreign_acquire(ledger: Path, agent_id: str, on_waiting: Callable[[], object] = lambda: None) -> None:
    """The example from the specification, line by line."""
    while True:
        try:
            fd = os.open(ledger / "ledger.lock", os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
        except FileExistsError:
            on_waiting()
            time.sleep(0.01)
            continue
        now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        os.write(fd, json.dumps({"agent_id": agent_id, "acquired_at": now}).encode() + b"\n")
        os.close(fd)
        return


def foreign_release(ledger: Path) -> None:
    os.remove(ledger / "ledger.lock")


@pytest.mark.req("LG-02")
def test_another_program_keeps_us_out(ledger: Path, workers: Workers) -> None:
    def foreign(line: Line) -> None:
        foreign_acquire(ledger, "agent-foreign")
        line.say("held")
        line.wait()
        foreign_release(ledger)
        line.say("released")

    other = workers.start(foreign)
    assert other.hear() == "held"
    with pytest.raises(LockTimeout, match=r"timeout waiting for lock.*agent-foreign"):
        observer(ledger).acquire()
    assert other.ask("release") == "released"
    assert not is_held(ledger)


@pytest.mark.req("LG-02")
def test_we_keep_another_program_out(ledger: Path, workers: Workers) -> None:
    def foreign(line: Line) -> None:
        foreign_acquire(ledger, "agent-foreign", lambda: line.say("waiting"))
        line.say("held")

    held = waiting_lock(ledger).acquire()
    other = workers.start(foreign)
    assert [other.hear() for _ in range(3)] == ["waiting"] * 3
    held.release()
    wait_until(lambda: other.hear() == "held")


_RECIPE = r"""
LEDGER_DIR="$1"
LOCK_FILE="$LEDGER_DIR/ledger.lock"

# 1. Acquire lock (simplified - production should use proper atomic creation)
while ! mkdir "$LOCK_FILE" 2>/dev/null; do
    echo waiting
    sleep 0.01
done
echo held
read -r _

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
"""


@pytest.fixture
def shell_tool(ledger: Path) -> Iterator[subprocess.Popen[str]]:
    """The specification's recipe in a real shell; it reports when it waits, and holds the lock until told to go on."""
    bash = shutil.which("bash")
    if bash is None:
        pytest.skip("bash is not installed: the recipe for shell tools is untested")
    pipe = subprocess.PIPE
    command = [bash, "-c", _RECIPE, "recipe", str(ledger)]
    with subprocess.Popen(command, text=True, stdin=pipe, stdout=pipe) as process:
        yield process
        process.kill()


def lines(process: subprocess.Popen[str]) -> Iterator[str]:
    assert process.stdout is not None
    return (line.strip() for line in process.stdout)


@pytest.mark.req("LG-03")
def test_a_shell_tool_keeps_us_out(ledger: Path, shell_tool: subprocess.Popen[str]) -> None:
    assert "held" in lines(shell_tool)
    with pytest.raises(LockTimeout, match="held by a shell tool"):
        observer(ledger).acquire()
    assert os.listdir(ledger / "ledger.lock") == []
    shell_tool.communicate("\n")
    with waiting_lock(ledger).acquire():
        assert (ledger / "event-000001.json").exists()


@pytest.mark.req("LG-03")
def test_we_keep_a_shell_tool_out(ledger: Path, request: pytest.FixtureRequest) -> None:
    held = waiting_lock(ledger).acquire()
    shell_tool: subprocess.Popen[str] = request.getfixturevalue("shell_tool")
    heard = lines(shell_tool)
    assert [next(heard) for _ in range(3)] == ["waiting"] * 3
    held.release()
    assert "held" in heard
    assert is_held(ledger)
    shell_tool.communicate("\n")
    assert (ledger / "event-000001.json").exists()
    assert not is_held(ledger)


_COUNTING_SHELL = """
for ((i = 0; i < $3; i++)); do
    while ! mkdir "$1" 2>/dev/null; do sleep 0.01; done
    read -r count < "$2"; printf '%08d\\n' $((10#$count + 1)) 1<> "$2"
    rmdir "$1"
done
"""


@pytest.mark.req("LG-02", "LG-03")
def test_our_processes_other_programs_and_shell_tools_all_exclude_each_other(ledger: Path, workers: Workers) -> None:
    counter = ledger / "counter"
    counter.write_text("00000000\n")

    def ours(line: Line) -> None:
        for _ in range(50):
            with waiting_lock(ledger).acquire():
                count_up(counter)

    def foreign(line: Line) -> None:
        for _ in range(20):
            foreign_acquire(ledger, "agent-foreign")
            count_up(counter)
            foreign_release(ledger)

    shell = [
        shutil.which("bash") or "sh",
        "-c",
        _COUNTING_SHELL,
        "count",
        str(ledger / "ledger.lock"),
        str(counter),
    ]
    tools = [subprocess.Popen([*shell, "20"]) for _ in range(2 if shutil.which("bash") else 0)]
    running = workers.start_many(3, ours) + workers.start_many(2, foreign)
    ends = [each.wait() for each in running] + [each.wait() for each in tools]
    assert ends == [0] * len(ends)
    assert int(counter.read_text()) == 3 * 50 + 2 * 20 + len(tools) * 20
