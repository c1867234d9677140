"""The issue commands, each run as a process."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from holdfast.issues.model import CLAIMS
from holdfast.issues.tracker import Tracker
from holdfast.locks.file_lock import FileLocker
from holdfast.store.files import FileStore
from holdfast.store.model import Decision, Replace, View
from tests.cli.commands import HOLDFAST, Result, Running, data, environment, error, holdfast, wait_until

Do = Callable[..., Result]


@pytest.fixture
def do(scratch: Path) -> Do:
    """A function that runs a command in a directory with a tracker."""
    assert holdfast("issue", "init", cwd=scratch).returncode == 0

    def run(*words: str, env: dict[str, str] | None = None, stdin: str = "") -> Result:
        return holdfast(*words, cwd=scratch, env=env, stdin=stdin)

    return run


def create(do: Do, title: str, *more: str) -> str:
    return do("issue", "create", title, *more, "--field", "id").stdout.strip()


def test_an_issue_goes_through_its_whole_life_cycle(do: Do) -> None:
    parser = create(do, "Write the parser", "--priority", "high", "--label", "area:x", "--description", "all of it")
    user = create(do, "Use the parser", "--depends-on", parser[:6])

    assert do("ready", "--field", "id").stdout.split() == [parser]
    assert "waits for" in do("blocked").stdout
    assert data(do("blocked", "--json"))["issues"][0]["blocked_by"][0]["id"] == parser
    claimed = data(do("issue", "claim-next", "--actor", "agent:a", "--ttl", "5m", "--json"))
    assert (claimed["id"], claimed["token"], claimed["ttl"]) == (parser, 1, 300.0)
    late = do("issue", "claim", parser[:6], "--json")
    assert (late.returncode, error(late)["code"], error(late)["assignee"]) == (
        4,
        "E_ISSUE_CLAIMED",
        "agent:a",
    )
    refused = do("issue", "update", parser, "--state", "done")
    assert refused.returncode == 4
    assert "claimed by agent:a" in refused.stderr
    mine = {"HOLDFAST_CLAIM_ID": claimed["claim_id"]}
    assert do("issue", "update", user, "--label", "later", env=mine).returncode == 0  # about another issue
    assert "is yours for another" in do("issue", "heartbeat", parser, env=mine).stdout
    done = do("issue", "update", parser, "--state", "done", env=mine)
    assert done.stdout == f"updated {parser[:8]} (done): Write the parser\n"
    assert do("ready", "--field", "title").stdout == "Use the parser\n"
    shown = data(do("issue", "show", parser, "--json"))
    assert (shown["state"], shown["assignee"], shown["claim"], shown["dependents"]) == (
        "done",
        "agent:a",
        None,
        [user],
    )
    late = do("issue", "heartbeat", parser, env=mine)
    assert late.returncode == 5


@pytest.mark.req("FL-19")
def test_an_issue_is_finished_by_its_claim_alone_or_by_its_id(do: Do) -> None:
    first, second = create(do, "x"), create(do, "y")
    claimed = data(do("issue", "claim-next", "--json"))
    mine = {"HOLDFAST_CLAIM_ID": claimed["claim_id"]}

    assert do("issue", "finish").returncode == 2
    assert do("issue", "finish", first).returncode == 4
    assert do("issue", "finish", env=mine).stdout == f"finished {first[:8]} (done): x\n"
    assert data(do("issue", "finish", second[:8], "--json"))["state"] == "done"
    assert do("issue", "finish", env=mine).returncode != 0


def test_finishing_an_issue_names_the_gates_that_are_not_passed(do: Do) -> None:
    do("gate", "define", "review")
    issue = create(do, "x", "--gate", "review")

    assert do("issue", "finish", issue).stdout.splitlines() == [
        f"finished {issue[:8]} (gated): x",
        "  done when these gates pass: review",
    ]


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        (("issue", "done"), "finish"),
        (("dep", "rm"), "remove"),
        (("commit",), "snapshot"),
        (("log",), "history"),
        (("finish",), "holdfast issue finish"),
        (("issue", "ready"), "holdfast ready"),
        (("create",), "holdfast worktree create' or 'holdfast ref create' or 'holdfast issue create"),
    ],
)
def test_a_name_from_another_program_or_group_gets_a_suggestion(do: Do, words: tuple[str, ...], meant: str) -> None:
    assert f"Did you mean '{meant}'?" in do(*words).stderr


def test_a_late_write_with_an_old_claim_is_refused(do: Do, scratch: Path) -> None:
    issue = create(do, "x")
    old = do("issue", "claim", issue, "--field", "claim_id").stdout.strip()
    expire(scratch, issue)
    assert "expired" in do("issue", "show", issue).stdout
    new = data(do("issue", "claim", issue, "--actor", "agent:b", "--json"))
    late = do("issue", "update", issue, "--state", "done", "--claim", old, "--json")

    assert (new["token"], new["taken_over_from"] is not None) == (2, True)
    assert (late.returncode, error(late)["code"], error(late)["current_token"]) == (
        5,
        "E_FENCING_MISMATCH",
        2,
    )
    assert do("issue", "release", issue, "--claim", new["claim_id"], "--reason", "r").returncode == 0
    assert do("issue", "show", issue, "--field", "state").stdout == "ready\n"


def expire(directory: Path, issue: str) -> None:
    """Backdate the expiry of the claim."""
    import msgspec

    key = CLAIMS.key(issue)

    def decide(view: View, now: float) -> Decision[None]:
        record = view.get(key)
        assert record is not None
        assert record.claim is not None
        long_ago = "2001-01-01T00:00:00Z"
        claim = msgspec.structs.replace(record.claim, expires_at=long_ago, boot_expires_at=None)
        return Decision([Replace(key, msgspec.structs.replace(record, claim=claim))], None)

    FileStore(directory).transact([key], decide)


def test_dependencies_are_added_skipped_refused_removed_and_drawn(do: Do) -> None:
    a, b, c = (create(do, title) for title in "abc")
    assert do("dep", "add", a, b).stdout == f"added {a[:8]} -> {b[:8]}\n"
    assert do("dep", "add", b, c).returncode == 0
    skipped = do("dep", "add", a, c)
    assert "redundant" in skipped.stdout
    assert f"{a[:8]} -> {b[:8]} -> {c[:8]}" in skipped.stdout
    assert "already" in do("dep", "add", a, b).stdout
    circle = do("dep", "add", c, a, "--json")
    assert (circle.returncode, error(circle)["code"], error(circle)["path"]) == (
        7,
        "E_DEPENDENCY_CYCLE",
        [c, a, b, c],
    )
    assert do("dep", "tree", a).stdout == f"{a[:8]} (backlog) a\n  {b[:8]} (backlog) b\n    {c[:8]} (ready) c\n"
    assert do("graph").stdout == do("dep", "tree", a).stdout
    assert f'"{a}" -> "{b}";' in do("graph", "--format", "dot").stdout
    assert "n0 --> n1" in do("graph", "--format", "mermaid").stdout
    assert len(data(do("graph", "--json"))["edges"]) == 2
    assert do("dep", "remove", a, b).returncode == 0
    assert do("dep", "remove", a, b).returncode == 3


def test_gates_are_defined_required_checked_and_passed(do: Do, scratch: Path) -> None:
    assert do("gate", "define", "review", "--title", "read").stdout == "defined review (manual)\n"
    assert do("gate", "define", "tests", "--checker", "cat proof", "--timeout", "30s").returncode == 0
    assert do("gate", "define", "tests").returncode == 4
    issue = create(do, "x", "--gate", "review")
    assert do("gate", "require", issue, "tests", "review").stdout == f"{issue[:8]} requires review, tests\n"
    assert "done when these gates pass: review, tests" in do("issue", "update", issue, "--state", "done").stdout
    failed = do("gate", "check", issue, "--json")
    assert (failed.returncode, error(failed)["code"]) == (1, "E_GATE_FAILED")
    assert "No such file" in error(failed)["runs"][0]["stderr"]
    assert do("gate", "pass", issue, "tests").returncode == 7
    assert "gated" in do("gate", "pass", issue, "review").stdout
    (scratch / "proof").write_text("here")
    assert do("gate", "check", issue[:8], "tests").stdout.endswith(f"{issue[:8]} is done\n")
    assert "no automatic gate" in do("gate", "check", issue).stdout
    assert len(list((scratch / ".jit/gate-runs").iterdir())) == 2
    assert do("gate", "list").stdout.splitlines()[1:] == ["review  manual  read", "tests   auto    cat proof"]
    assert [gate["key"] for gate in data(do("gate", "list", "--json"))["gates"]] == ["review", "tests"]


def test_a_batch_is_created_from_standard_input(do: Do) -> None:
    batch = [{"title": "A", "key": "a"}, {"title": "B", "depends_on": ["a"], "labels": ["x"]}]
    created = data(do("issue", "create", "--batch", "--json", stdin=json.dumps(batch)))

    assert [issue["state"] for issue in created["issues"]] == ["ready", "backlog"]
    assert created["issues"][1]["dependencies"] == [created["issues"][0]["id"]]
    for wrong in ("", "nonsense", '[{"titel": "A"}]', '[{"title": "A", "depends_on": ["nothing"]}]'):
        assert do("issue", "create", "--batch", stdin=wrong).returncode in (2, 3)
    assert do("issue", "create", "A", "--batch").returncode == do("issue", "create").returncode == 2
    assert len(data(do("issue", "list", "--json"))["issues"]) == 2


def test_lists_are_printed_as_tables_records_or_fields(do: Do) -> None:
    a = create(do, "first\x1b[2J", "--label", "area:a")
    b = create(do, "second", "--assignee", "human:bob", "--priority", "low")

    assert do("issue", "list").stdout.splitlines() == [
        "ID        STATE  PRIORITY  ASSIGNEE   TITLE",
        f"{a[:8]}  ready  normal    -          first\\x1b[2J",
        f"{b[:8]}  ready  low       human:bob  second",
    ]
    assert do("issue", "list", "--label", "area:*", "--field", "id").stdout == a + "\n"
    assert do("issue", "list", "--assignee", "human:bob", "--field", "short_id").stdout == b[:8] + "\n"
    assert do("issue", "search", "SECOND", "--field", "priority").stdout == "low\n"
    assert do("issue", "list", "--state", "done").stdout == ""
    assert data(do("issue", "list", "--field", "labels", "--json")) == {
        "field": "labels",
        "values": [["area:a"], []],
    }
    wrong = do("issue", "list", "--field", "colour")
    assert wrong.returncode == 2
    assert "The fields are: id, short_id, title" in wrong.stderr


def test_the_context_can_be_set_incremented_and_read(do: Do) -> None:
    issue = create(do, "x")
    do("issue", "update", issue, "--context", "branch=feature/x", "--increment", "n", "--increment", "m=-2")
    do("issue", "update", issue, "--increment", "n=2")

    assert do("issue", "show", issue, "--field", "context.branch").stdout == "feature/x\n"
    assert json.loads(do("issue", "show", issue, "--field", "context").stdout) == {
        "branch": "feature/x",
        "n": "3",
        "m": "-2",
    }
    version = do("issue", "show", issue, "--field", "version").stdout.strip()
    assert do("issue", "update", issue, "--context", "branch=", "--if-version", version).returncode == 0
    stale = do("issue", "update", issue, "--title", "y", "--if-version", version, "--json")
    assert (stale.returncode, error(stale)["code"]) == (4, "E_VERSION_MISMATCH")
    for wrong in (["--context", "x"], ["--increment", "n=x"], [], ["--assignee", "bob"]):
        assert do("issue", "update", issue, *wrong).returncode == 2


def test_issues_are_broken_down_deleted_exported_and_imported(do: Do, tmp_path: Path) -> None:
    whole = create(do, "whole", "--priority", "high")
    parts = data(do("issue", "breakdown", whole, "--part", "one", "--part", "two", "--json"))["parts"]
    assert [(part["title"], part["priority"]) for part in parts] == [("one", "high"), ("two", "high")]
    part = parts[0]["id"]
    assert f"would delete {part[:8]}" in do("issue", "delete", part, "--dry-run").stdout
    assert f"no longer a dependency of {whole[:8]}" in do("issue", "delete", part).stdout
    assert do("issue", "show", part).returncode == 3
    backup = do("issue", "export").stdout
    other = str(tmp_path / "other")
    assert holdfast("issue", "init", "--repo", other).returncode == 0
    imported = holdfast("issue", "import", "-", "--repo", other, "--json", stdin=backup)
    assert sorted(data(imported)["issues"]) == sorted([whole, parts[1]["id"]])
    (tmp_path / "file.json").write_text(backup)
    again = holdfast("issue", "import", tmp_path / "file.json", env={"HOLDFAST_REPO": other})
    assert again.returncode == 4


def test_damage_is_found_and_fixed(do: Do, scratch: Path) -> None:
    issue = create(do, "x")
    assert do("issue", "validate").stdout == "no findings\n"
    (scratch / ".jit/index.json").write_text('{"schema_version":2,"all_ids":[]}')
    found = do("issue", "validate", "--json")
    assert (found.returncode, error(found)["findings"][0]["kind"]) == (6, "unlisted")
    fixed = do("issue", "validate", "--fix")
    assert (fixed.returncode, fixed.stdout.split(":")[0]) == (0, "fixed unlisted")
    assert do("issue", "list", "--field", "id").stdout.strip() == issue


# --- Location, actor and settings -------------------------------------------------------------------


def test_the_tracker_is_found_from_a_subdirectory_and_not_from_elsewhere(do: Do, scratch: Path, tmp_path: Path) -> None:
    below = scratch / "a/b"
    below.mkdir(parents=True)

    assert holdfast("issue", "create", "x", cwd=below).returncode == 0
    nowhere = holdfast("ready", "--json", cwd=tmp_path)
    assert (nowhere.returncode, error(nowhere)["code"]) == (3, "E_NOT_INITIALISED")
    assert not list(tmp_path.iterdir())
    assert holdfast("ready", "--repo", tmp_path / "none").returncode == 3
    assert not (tmp_path / "none").exists()
    assert "a tracker already exists" in do("issue", "init").stdout


def test_the_actor_is_recorded(do: Do) -> None:
    create(do, "one", "--actor", "agent:flag")
    do("issue", "create", "two", env={"HOLDFAST_ACTOR": "agent:variable"})
    do("issue", "create", "three")
    actors = [event["by"] for event in data(do("events", "--json"))["events"]]

    assert actors[:2] == ["agent:flag", "agent:variable"]
    assert actors[2].startswith("human:")
    assert do("issue", "create", "x", "--actor", "me").returncode == 2
    assert "HOLDFAST_ACTOR" in do("issue", "create", "x", env={"HOLDFAST_ACTOR": "me"}).stderr


@pytest.mark.req("FL-04", "FL-14")
def test_a_lock_timeout_names_the_lock_and_gives_three_hints(do: Do, scratch: Path) -> None:
    issue = create(do, "x")
    lock = scratch / f".jit/issues/{issue}.lock"
    with FileLocker(5.0).lock_exclusive(lock):
        result = do("issue", "update", issue, "--title", "y", env={"JIT_LOCK_TIMEOUT": "0.2"})
        as_json = do("issue", "update", issue, "--title", "y", "--json", env={"JIT_LOCK_TIMEOUT": "0.2"})

    assert result.returncode == 75
    message, blank, *hints = result.stderr.splitlines()
    assert message.startswith(f"Error: Lock timeout: could not acquire lock on {lock} after 200ms")
    assert (blank, hints) == (
        "",
        [
            "This usually means another holdfast process is running.",
            "Try:",
            "  1. Wait a few seconds and retry",
            "  2. Check for stuck processes: ps aux | grep holdfast",
            "  3. Increase timeout: JIT_LOCK_TIMEOUT=10 holdfast ...",
            "",
            "Code: E_LOCK_TIMEOUT",
        ],
    )
    failure = error(as_json)
    assert (failure["code"], failure["timeout"], failure["retryable"]) == ("E_LOCK_TIMEOUT", 0.2, True)


@pytest.mark.req("FL-14")
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("JIT_LOCK_TIMEOUT", "soon"),
        ("JIT_LOCK_TIMEOUT", "-1"),
        ("JIT_RETRY_MAX_ATTEMPTS", "0"),
        ("JIT_RETRY_INITIAL_DELAY_MS", "x"),
    ],
)
@pytest.mark.sampled(1)
def test_a_malformed_setting_is_an_error(do: Do, name: str, value: str) -> None:
    result = do("ready", env={name: value})

    assert result.returncode == 2
    assert f"{name} is '{value}'" in result.stderr


@pytest.mark.req("FL-20")
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux shows the holders of a lock")
def test_the_holders_of_locks_and_their_waiters_are_shown(do: Do, scratch: Path) -> None:
    issue = create(do, "x")
    assert do("issue", "locks").stdout == "no lock is held\n"
    lock = scratch / f".jit/issues/{issue}.lock"
    with FileLocker(5.0).lock_exclusive(lock):
        repo = ["--repo", str(scratch)]
        long_wait = {"JIT_LOCK_TIMEOUT": "60"}  # long enough for a busy machine to run 'issue locks'
        with Running("issue", "update", issue, "--title", "y", *repo, env=long_wait) as waiting:

            def seen() -> Any:
                return [each for each in data(do("issue", "locks", "--json"))["locks"] if each["waiting"]]

            wait_until(seen)
            [held] = seen()
            assert held["path"] == str(lock)
            assert [each["pid"] for each in held["holders"]] == [os.getpid()]
            assert [each["pid"] for each in held["waiting"]] == [waiting.pid]


# --- Events, work and terminals ---------------------------------------------------------------------


def test_events_are_shown_filtered_and_followed(do: Do, scratch: Path) -> None:
    a = create(do, "a")
    create(do, "b")
    assert len(do("events").stdout.splitlines()) == 2
    assert "issue_created" in do("events", "--issue", a[:8], "--type", "issue_created", "--limit", "1").stdout
    with Running("events", "--follow", "--json", "--repo", scratch) as following:
        assert json.loads(following.hear())["data"]["issue_id"] == a
        following.hear()
        do("issue", "update", a, "--title", "c")
        assert json.loads(following.hear())["data"]["fields"] == ["title"]


@pytest.mark.skipif(sys.platform == "win32", reason="needs a Unix shell")
def test_work_is_done_under_a_claim_that_is_kept_alive(do: Do) -> None:
    a, b = create(do, "a", "--priority", "high"), create(do, "b")
    script = f"{' '.join(HOLDFAST)} issue show $HOLDFAST_ISSUE_ID --field claim.claim_id; echo $HOLDFAST_CLAIM_ID"
    worked = do("issue", "work", "--next", "--ttl", "2s", "--", "sh", "-c", script)

    claims = worked.stdout.split()
    assert (worked.returncode, len(claims), len(set(claims))) == (0, 2, 1)
    assert do("issue", "show", a, "--field", "state").stdout == "done\n"
    failed = do("issue", "work", b, "--json", "--", "sh", "-c", "exit 9")
    assert failed.returncode == 9
    assert json.loads(failed.stderr)["data"]["state"] == "ready"
    assert do("issue", "work", "--", "true").returncode == 2
    do("issue", "delete", b)
    assert do("issue", "work", "--next", "--", "true").returncode == 3


@pytest.mark.skipif(sys.platform == "win32", reason="needs a Unix shell")
def test_work_is_terminated_when_its_claim_is_lost(do: Do, scratch: Path) -> None:
    issue = create(do, "a")
    script = "echo begun; exec sleep 1000"
    repo = ["--repo", str(scratch), "--json"]
    with Running("issue", "work", issue, "--ttl", "1s", *repo, "--", "sh", "-c", script) as working:
        assert working.hear() == "begun"
        claim = do("issue", "show", issue, "--field", "claim.claim_id").stdout.strip()
        assert do("issue", "release", issue, "--claim", claim).returncode == 0
        ended = working.finish()

    assert ended.returncode == 5
    assert json.loads(ended.stderr)["error"]["code"] == "E_FENCING_MISMATCH"
    assert do("issue", "show", issue, "--field", "state").stdout == "ready\n"


@pytest.mark.skipif(sys.platform == "win32", reason="needs a pseudo-terminal")
def test_a_terminal_gets_a_styled_table(do: Do, scratch: Path) -> None:
    if sys.platform == "win32":
        raise NotImplementedError
    import pty

    create(do, "shown to a person")
    written = bytearray()

    def read(descriptor: int) -> bytes:
        block = os.read(descriptor, 4096)
        written.extend(block)
        return block

    before, wanted = dict(os.environ), environment({"TERM": "xterm", "COLUMNS": "100"})
    os.environ.clear()
    os.environ.update(wanted)
    try:
        status = pty.spawn([*HOLDFAST, "issue", "list", "--repo", str(scratch)], read)
    finally:
        os.environ.clear()
        os.environ.update(before)
    assert status == 0
    assert b"shown to a person" in written
    assert b"\x1b[" in written


def test_a_tracker_opened_from_python_sees_the_same_issues(do: Do, scratch: Path) -> None:
    issue = create(do, "x")

    assert Tracker(FileStore(scratch), actor="agent:x").issue(issue).title == "x"


def test_an_unreadable_issue_is_named_and_the_others_stay_usable(do: Do, scratch: Path) -> None:
    torn = create(do, "torn")
    waiting = create(do, "waiting", "--depends-on", torn)
    free = create(do, "free")
    path = scratch / f".jit/issues/{torn}.json"
    whole = path.read_bytes()
    path.write_bytes(b"<<<<<<< HEAD\n" + whole)

    for words in (["issue", "list", "--field", "id"], ["graph"], ["dep", "tree", waiting]):
        shown = do(*words)
        assert shown.returncode == 0, words
        assert f"Warning: {torn[:8]} is left out" in shown.stderr
        assert str(path) in shown.stderr
        if words[-1] == "id":
            assert shown.stdout.split() == [waiting, free]
    for words in (["issue", "search", "free"], ["ready"], ["blocked"]):
        told = do(*words, "--json")
        assert (told.returncode, told.stderr) == (0, "")
        assert [(each["path"], each["code"]) for each in data(told)["broken"]] == [(str(path), "E_CORRUPT")]
    assert data(told)["issues"][0]["blocked_by"][0]["state"] == "broken"
    shown = data(do("issue", "show", waiting, "--json"))
    assert (shown["state"], shown["broken"][0]["id"]) == ("backlog", torn)

    refused = do("issue", "claim", waiting, "--json")
    assert (refused.returncode, error(refused)["code"]) == (7, "E_BLOCKED")
    assert str(path) in error(refused)["hint"]
    claimed = do("issue", "claim-next", "--field", "id")
    assert claimed.stdout.strip() == free
    assert str(path) in claimed.stderr
    nothing = do("issue", "claim-next", "--json")
    assert (nothing.returncode, error(nothing)["broken"][0]["path"]) == (3, str(path))
    assert do("issue", "export").returncode == 6
    checked = do("issue", "validate", "--fix")
    assert (checked.returncode, "unreadable" in checked.stdout) == (6, True)
    assert path.read_bytes() == b"<<<<<<< HEAD\n" + whole
    path.write_bytes(whole)
    assert do("issue", "list").stderr == ""
