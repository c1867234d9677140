"""`holdfast ledger`: output and exit statuses.

Most commands run inside this process, which is a hundred times faster. Commands that wait or depend on a terminal
or on the current directory run in their own processes.
"""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import time
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import pytest

from holdfast.cli.entry import run
from tests.cli import commands
from tests.cli.commands import HOLDFAST, PATIENCE, Result, Running, data, environment, error
from tests.ledger.ledgers import acquired, append_raw, open_ledger

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="needs Unix terminals and lock holders")


def holdfast(*arguments: str | Path, stdin: str = "") -> Result:
    """Run a command in this process."""
    out, err = io.StringIO(), io.StringIO()
    given, sys.stdin = sys.stdin, io.TextIOWrapper(io.BytesIO(stdin.encode()))
    try:
        with redirect_stdout(out), redirect_stderr(err):
            status = run([str(each) for each in arguments])
    finally:
        sys.stdin = given
    return Result(arguments, status, out.getvalue(), err.getvalue())


@pytest.fixture
def proof(scratch: Path) -> Path:
    assert holdfast("ledger", "init", "--repo", scratch).returncode == 0
    return scratch


def append(proof: Path, *events: dict[str, Any]) -> None:
    text = "\n".join(json.dumps(event) for event in events)
    assert holdfast("ledger", "append", "-", "--repo", proof, stdin=text).returncode == 0


# --- The ledger ------------------------------------------------------------------------------------------


@pytest.mark.req("LG-07")
def test_a_ledger_is_created_in_the_current_directory(scratch: Path) -> None:
    result = commands.holdfast("ledger", "init", "--lock-timeout", "1m", cwd=scratch)
    assert (result.returncode, result.stdout) == (0, f"Created a ledger in {scratch}.\n")
    assert json.loads((scratch / "meta.json").read_bytes()) == {"lock_timeout": "1m"}
    again = holdfast("ledger", "init", "--json", "--repo", scratch)
    assert (again.returncode, error(again)["code"]) == (4, "E_ALREADY_EXISTS")
    bad = holdfast("ledger", "init", "--lock-timeout", "2h", "--repo", scratch / "other")
    assert (bad.returncode, "from 1s to 1h" in bad.stderr) == (2, True)


def test_without_a_ledger_every_command_says_so_and_creates_nothing(scratch: Path) -> None:
    for command in (
        ("ledger", "log"),
        ("ledger", "verify"),
        ("ledger", "claims"),
        ("ledger", "append", "{}"),
    ):
        result = holdfast(*command, "--repo", scratch)
        assert (result.returncode, result.stdout) == (3, "")
        assert "holdfast ledger init" in result.stderr
    assert os.listdir(scratch) == []


@pytest.mark.req("LG-11")
def test_events_are_appended_singly_in_batches_or_conditionally(proof: Path) -> None:
    first = holdfast("ledger", "append", '{"type":"note","text":"ä"}', "--repo", proof, "--json")
    assert data(first)["sequence"] == 1
    assert holdfast("ledger", "append", '{"type":"note"}', "--repo", proof).stdout == "Appended event 2.\n"
    many = holdfast("ledger", "append", "-", "--repo", proof, stdin='{"type":"a"}\n\n{"type":"b"}\n')
    assert many.stdout == "Appended events 3 to 4.\n"
    late = holdfast("ledger", "append", '{"type":"x"}', "--if-sequence", "2", "--repo", proof, "--json")
    assert (late.returncode, error(late)["code"], error(late)["found"]) == (4, "E_SEQUENCE_MISMATCH", 4)
    fitting = holdfast("ledger", "append", '{"type":"x"}', "--if-sequence", "4", "--repo", proof, "--json")
    assert data(fitting)["sequence"] == 5
    half = holdfast("ledger", "append", "-", "--repo", proof, stdin='{"type":"a"}\n{"type"\n')
    assert (half.returncode, "line 2" in half.stderr) == (2, True)
    assert open_ledger(proof).sequence == 5


def test_invalid_events_are_refused(proof: Path) -> None:
    for text in ("", "{", "[]", '{"text":"x"}', '{"type":"a","type":"b"}', '{"type":"' + "x" * 200 + '"}'):
        result = holdfast("ledger", "append", text, "--repo", proof)
        assert result.returncode == 2, text
        assert result.stderr.startswith("Error: ")
    large = json.dumps({"type": "a", "text": "x" * (1 << 20)})
    result = holdfast("ledger", "append", "-", "--repo", proof, "--json", stdin=large)
    assert (result.returncode, error(result)["code"]) == (2, "E_TOO_LARGE")
    assert open_ledger(proof).sequence == 0


def test_the_log_is_json_lines_in_a_pipe_and_one_object_on_request(proof: Path) -> None:
    nodes = ({"type": "b", "node_id": "1.2"}, {"type": "b", "node_id": "1.20"})
    append(proof, {"type": "a"}, *nodes, {"type": "c"})

    def sequences(*options: str) -> list[int]:
        shown = holdfast("ledger", "log", "--repo", proof, *options).stdout
        return [json.loads(line)["sequence"] for line in shown.splitlines()]

    assert sequences() == [1, 2, 3, 4]
    assert sequences("--after", "1", "--until", "3") == [2, 3]
    assert sequences("--limit", "2") == [3, 4]
    assert sequences("--limit", "1", "--type", "b") == [3]
    assert sequences("--node", "1.2") == [2]
    assert sequences("--type", "none") == []
    whole = holdfast("ledger", "log", "--repo", proof, "--json")
    assert [each["event"]["type"] for each in data(whole)["events"]] == ["a", "b", "b", "c"]
    assert holdfast("ledger", "log", "--node", "x", "--repo", proof).returncode == 2


def test_the_log_is_a_table_on_a_terminal(proof: Path) -> None:
    append(proof, {"type": "note", "text": "a\x1b[31mb"})
    assert holdfast("ledger", "claim", "1.2", "--actor", "agent-7", "--repo", proof).returncode == 0
    if sys.platform == "win32":
        raise NotImplementedError
    ours, theirs = os.openpty()
    command = [*HOLDFAST, "ledger", "log", "--repo", str(proof)]
    subprocess.run(command, stdout=theirs, env=environment(), timeout=PATIENCE, check=True)
    os.close(theirs)
    shown = os.read(ours, 1 << 16).decode()
    os.close(ours)
    first, second = shown.splitlines()
    assert first.split()[0] == "1"
    assert "\\x1b[31m" in first
    assert second.split()[3:6] == ["lock_acquired", "1.2", "agent-7"]


def test_an_event_is_shown_by_its_sequence_or_by_its_id(proof: Path) -> None:
    append(proof, {"type": "a", "id": "my-id"}, {"type": "b"})
    assert data(holdfast("ledger", "show", "my-id", "--repo", proof, "--json"))["sequence"] == 1
    assert "type       b" in holdfast("ledger", "show", "2", "--repo", proof).stdout
    for missing in ("3", "0", "another-id"):
        assert holdfast("ledger", "show", missing, "--repo", proof).returncode == 3
    assert "it was not" in holdfast("ledger", "show", "another-id", "--repo", proof).stderr


def test_events_are_shown_as_they_arrive(proof: Path) -> None:
    append(proof, {"type": "old"})
    with Running("ledger", "watch", "--repo", proof, "--after", "0", "--limit", "3") as watching:
        assert json.loads(watching.hear())["event"]["type"] == "old"
        append(proof, {"type": "new"}, {"type": "newer"})
        assert json.loads(watching.hear())["event"]["type"] == "new"
        assert json.loads(watching.hear())["sequence"] == 3
        assert watching.finish().returncode == 0
    quiet = holdfast("ledger", "watch", "--repo", proof, "--wait", "10ms", "--json")
    assert (quiet.returncode, quiet.stdout) == (0, "")
    with Running("ledger", "watch", "--repo", proof, "--after", "2", "--json") as watching:
        assert json.loads(watching.hear())["data"]["event"]["type"] == "newer"
        append(proof, {"type": "newest"})
        assert json.loads(watching.hear())["data"]["sequence"] == 4


def test_the_state_of_a_ledger_is_shown(proof: Path) -> None:
    append(proof, {"type": "a"})
    append_raw(open_ledger(proof), acquired("1", "gone", expires_in=-1), acquired("2", "me", expires_in=60))
    state = data(holdfast("ledger", "status", "--repo", proof, "--json"))
    assert (state["sequence"], state["active_claims"], state["expired_claims"]) == (3, 1, 1)
    assert (state["lock"], state["lock_timeout"]) == (None, 300.0)
    assert "lock     free" in holdfast("ledger", "status", "--repo", proof).stdout


def test_verify_accepts_a_sound_ledger_and_exits_with_6_for_a_damaged_one(proof: Path) -> None:
    append(proof, {"type": "a"}, {"type": "b"}, {"type": "c"})
    sound = holdfast("ledger", "verify", "--repo", proof)
    assert (sound.returncode, sound.stdout) == (0, "3 events can be read in order.\n")
    (proof / "ledger/event-000002.json").write_bytes(b"")
    torn = holdfast("ledger", "verify", "--repo", proof)
    assert torn.returncode == 6
    assert "event-000002.json" in torn.stdout
    assert "-> Keep a copy of it." in torn.stdout
    found = error(holdfast("ledger", "verify", "--repo", proof, "--json"))
    assert (found["code"], [each["kind"] for each in found["findings"]]) == ("E_CORRUPT", ["torn", "lost"])
    log = holdfast("ledger", "log", "--repo", proof)
    assert (log.returncode, len(log.stdout.splitlines())) == (6, 1)
    assert "holdfast ledger verify" in log.stderr


@pytest.mark.req("LG-03", "LG-05")
def test_a_lock_is_shown_and_broken_only_by_its_exact_identity(proof: Path) -> None:
    assert "free" in holdfast("ledger", "unlock", "--repo", proof).stdout
    lock = proof / "ledger/ledger.lock"
    lock.write_text('{"agent_id":"go-agent","acquired_at":"2024-01-15T10:30:00Z"}')
    os.utime(lock, (time.time() - 100, time.time() - 100))
    shown = data(holdfast("ledger", "unlock", "--repo", proof, "--json"))["lock"]
    assert (shown["agent_id"], shown["certainly_dead"], shown["suspect"]) == ("go-agent", False, True)
    people = holdfast("ledger", "unlock", "--repo", proof)
    assert people.returncode == 0
    assert f"holdfast ledger unlock --identity {shown['identity']}" in people.stdout
    assert lock.exists()
    wrong = holdfast("ledger", "unlock", "--identity", "0123456789abcdef", "--repo", proof, "--json")
    assert (wrong.returncode, error(wrong)["code"], lock.exists()) == (4, "E_LOCK_CHANGED", True)
    right = holdfast("ledger", "unlock", "--identity", shown["identity"], "--repo", proof, "--json")
    assert (right.returncode, data(right)["broken"], lock.exists()) == (0, True, False)
    (event,) = data(holdfast("ledger", "log", "--repo", proof, "--json"))["events"]
    assert (event["sequence"], event["event"]["type"]) == (data(right)["sequence"], "ledger_unlocked")


@pytest.mark.req("LG-12")
def test_a_missing_event_is_a_warning_when_reading_and_an_error_when_verifying(proof: Path) -> None:
    append(proof, *({"type": "note", "number": number} for number in range(1, 11)))
    (proof / "ledger/event-000003.json").unlink()
    assert data(holdfast("ledger", "append", '{"type":"note"}', "--repo", proof, "--json"))["sequence"] == 11
    shown = holdfast("ledger", "log", "--repo", proof)
    assert [json.loads(line)["sequence"] for line in shown.stdout.splitlines()] == [1, 2, *range(4, 12)]
    assert shown.stderr == "Warning: event 3 is missing. 'holdfast ledger verify' says what to do.\n"
    verified = holdfast("ledger", "verify", "--repo", proof)
    assert verified.stdout.startswith("10 events can be read in order.\n")
    assert "Warning" not in verified.stderr
    found = error(holdfast("ledger", "verify", "--repo", proof, "--json"))
    assert [each["kind"] for each in found["findings"]] == ["gap", "lost"]
    assert holdfast("ledger", "claim", "1", "--actor", "a", "--repo", proof).returncode == 0


# --- Claims ------------------------------------------------------------------------------------------------


@pytest.mark.req("LG-15")
def test_a_claim_is_taken_shown_extended_and_released(proof: Path) -> None:
    def claim(*arguments: str) -> Any:
        return holdfast("ledger", *arguments, "--repo", proof, "--json")

    taken = data(claim("claim", "1.2", "--actor", "a", "--ttl", "1m"))
    assert (taken["node_id"], taken["actor"], taken["sequence"]) == ("1.2", "a", 1)
    refused = claim("claim", "1.2", "--actor", "b")
    assert (refused.returncode, error(refused)["code"], error(refused)["actor"]) == (4, "E_NODE_LOCKED", "a")
    assert "node already locked" in error(refused)["message"]
    for command in ("release", "extend"):
        stranger = claim(command, "1.2", "--actor", "b")
        assert (stranger.returncode, error(stranger)["code"]) == (5, "E_LOCK_NOT_HELD")
    assert data(claim("extend", "1.2", "--actor", "a", "--claim", taken["claim_id"]))["time_left"] > 200
    listed = data(claim("claims", "--under", "1"))
    assert [each["claim_id"] for each in listed["active"]] == [taken["claim_id"]]
    assert "1.2   a      active" in holdfast("ledger", "claims", "--repo", proof).stdout
    assert data(claim("release", "1.2", "--actor", "a"))["actor"] == "a"
    assert data(claim("claims"))["active"] == []
    assert [each["node_id"] for each in data(claim("claims", "--at-sequence", "2"))["active"]] == ["1.2"]
    assert [each["event"]["type"] for each in data(claim("claim-history", "1.2"))["events"]] == [
        "lock_acquired",
        "lock_acquired",
        "lock_released",
    ]


@pytest.mark.req("LG-19")
def test_waiting_ends_with_the_claim_or_with_a_timeout(proof: Path) -> None:
    assert holdfast("ledger", "claim", "1", "--actor", "a", "--repo", proof).returncode == 0
    late = holdfast("ledger", "claim", "1", "--actor", "b", "--wait", "50ms", "--repo", proof, "--json")
    assert (late.returncode, error(late)["code"]) == (75, "E_LOCK_TIMEOUT")
    assert error(late)["holders"][0]["actor"] == "a"
    with Running("ledger", "claim", "1", "--actor", "c", "--wait", "forever", "--repo", proof) as waiting:
        while not data(holdfast("ledger", "claims", "--repo", proof, "--json"))["waiting"]:
            time.sleep(0.01)
        assert "1: c waits" in holdfast("ledger", "claims", "--repo", proof).stdout
        assert holdfast("ledger", "release", "1", "--actor", "a", "--repo", proof).returncode == 0
        assert waiting.hear().startswith("Claimed 1 for c")
        assert waiting.finish().returncode == 0


@pytest.mark.req("LG-10")
def test_expired_claims_are_reaped(proof: Path) -> None:
    append_raw(open_ledger(proof), acquired("1", "gone", expires_in=-5), acquired("2", "me", expires_in=60))
    assert "expired" in holdfast("ledger", "claims", "--repo", proof).stdout
    preview = holdfast("ledger", "reap", "--dry-run", "--repo", proof)
    assert preview.stdout.startswith("Would reap 1, which gone held")
    assert [each["node_id"] for each in data(holdfast("ledger", "reap", "--repo", proof, "--json"))["reaped"]] == ["1"]
    assert holdfast("ledger", "reap", "--repo", proof).stdout == "No claim has expired.\n"


@pytest.mark.req("LG-18")
def test_an_invalid_node_id_is_refused(proof: Path) -> None:
    for node in ("x", "1..2", "0", "1.02"):
        result = holdfast("ledger", "claim", node, "--actor", "a", "--repo", proof)
        assert (result.returncode, "numbers from 1 joined by dots" in result.stderr) == (2, True)


def test_a_waiter_that_is_interrupted_leaves_the_queue(proof: Path) -> None:
    assert holdfast("ledger", "claim", "1", "--actor", "a", "--repo", proof).returncode == 0
    with Running("ledger", "claim", "1", "--actor", "b", "--wait", "forever", "--repo", proof) as waiting:
        while not data(holdfast("ledger", "claims", "--repo", proof, "--json"))["waiting"]:
            time.sleep(0.01)
        waiting.send(signal.SIGINT)
        assert waiting.finish().returncode == 130
    assert data(holdfast("ledger", "claims", "--repo", proof, "--json"))["waiting"] == []


def test_events_written_to_a_pipe_contain_no_control_characters(proof: Path) -> None:
    text = "red\x1b[31m\x9b31m\u202etxet grün 字"
    event = json.dumps({"type": "note", "text": text})
    assert holdfast("ledger", "append", event, "--repo", proof).returncode == 0

    line = holdfast("ledger", "log", "--limit", "1", "--repo", proof).stdout

    assert line.removesuffix("\n").isprintable()
    assert "grün 字" in line
    assert json.loads(line)["event"]["text"] == text


def test_a_command_in_a_subdirectory_finds_the_ledger(scratch: Path) -> None:
    below, outside = scratch / "project" / "main", scratch / "outside"
    below.mkdir(parents=True)
    outside.mkdir()
    assert commands.holdfast("ledger", "init", "--repo", "project", cwd=scratch).returncode == 0

    assert commands.holdfast("ledger", "append", '{"type":"x"}', cwd=below).stdout == "Appended event 1.\n"
    assert commands.holdfast("ledger", "claim", "1", "--actor", "a", cwd=below).returncode == 0
    assert commands.holdfast("ledger", "claims", cwd=outside).returncode == 3
    told = {"HOLDFAST_REPO": str(scratch / "project")}
    assert "active" in commands.holdfast("ledger", "claims", cwd=outside, env=told).stdout
