"""`holdfast who` and `top` show everything that is held, correctly and without harm to the terminal."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, NoReturn

import pytest

from holdfast.cli.overview_view import AGENT_COLUMNS
from holdfast.cli.styled import Span, table
from holdfast.errors import StoreUnavailable
from holdfast.locks.identity import current_holder
from holdfast.repository import overview
from tests.cli.commands import (
    RepoLockHeld,
    Running,
    data,
    environment,
    error,
    holdfast,
    on_a_terminal,
    python,
    wait_until,
)
from tests.ledger.ledgers import append_raw, open_ledger

if sys.platform == "win32":
    pytest.skip("needs a POSIX shell", allow_module_level=True)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    directory = tmp_path / "root"
    assert holdfast("init", directory).returncode == 0
    return directory


def holdings(root: Path, **env: str) -> dict[str, Any]:
    seen = data(holdfast("who", "--json", "--repo", root, env=env))
    assert seen["unreadable"] == []
    return {f"{each['kind']} {each['what']}": each for each in seen["holdings"]}


def test_a_lease_is_shown_with_its_holder_its_time_and_its_queue(root: Path) -> None:
    held = ("run", "--repo", root, "--ttl", "1h", "--purpose", "first")
    with Running(*held, "--", "sleep", "99") as first:
        wait_until(lambda: "lease main" in holdings(root))
        waits = ("run", "--repo", root, "--wait", "60s", "--purpose", "second", "--", "true")
        with Running(*waits, env={"HOLDFAST_ACTOR": "agent:bob"}) as second:
            wait_until(lambda: holdings(root)["lease main"]["waiting"])
            lease = holdings(root)["lease main"]
            second.kill()
        assert f":{first.pid}:" in lease["who"]
        assert (lease["liveness"], lease["purpose"]) == ("alive", "first")
        assert 0 < lease["time_left"] <= 3600
        assert lease["reclaim"]["safe"] is False
        (waiting,) = lease["waiting"]
        assert (waiting["who"], waiting["place"], waiting["purpose"]) == ("agent:bob", 1, "second")
        assert waiting["liveness"] == "alive"
        first.kill()
        first.process.wait()
        wait_until(lambda: holdings(root)["lease main"]["liveness"] == "dead")


def test_claims_issues_and_repo_locks_are_shown_too(root: Path, tmp_path: Path) -> None:
    for command in (["issue", "init"], ["ledger", "init"], ["issue", "create", "Work"]):
        assert holdfast(*command, cwd=root).returncode == 0
    assert holdfast("ledger", "claim", "1.2", "--actor", "bob", cwd=root).returncode == 0
    claimed = holdfast("issue", "claim-next", "--actor", "agent:a", "--json", cwd=root)
    issue = data(claimed)["id"]
    with RepoLockHeld(tmp_path / "data", "project"):
        seen = holdings(root, HOLDFAST_DATA_DIR=str(tmp_path / "data"))

    assert seen["claim 1.2"]["who"] == "bob"
    assert seen[f"issue {issue}"]["who"] == "agent:a"
    assert seen["repo lock project"]["liveness"] == "alive"


@pytest.mark.req("FL-20")
def test_waiters_for_a_repo_lock_are_shown_wherever_they_wait(root: Path, tmp_path: Path) -> None:
    place = {"HOLDFAST_DATA_DIR": str(tmp_path / "data")}
    waits = ("repo-lock", "run", "project", "--wait", "60s", "--", "make")

    def waiting() -> list[Any]:
        return list(holdings(root, **place)["repo lock project"]["waiting"])

    with RepoLockHeld(tmp_path / "data", "project"):
        inside = Running(*waits, env={**place, "HOLDFAST_REPO": str(root)})
        outside = Running(*waits, env=place)
        with inside, outside:
            wait_until(lambda: len(waiting()) == 2)
            seen = waiting()
            table = holdfast("who", "--details", "--repo", root, env=place).stdout
        wait_until(lambda: not waiting())  # waiters that were killed are not shown

    assert {each["who"].split(":")[2] for each in seen} == {str(each.pid) for each in (inside, outside)}
    assert {(each["place"], each["purpose"], each["liveness"]) for each in seen} == {(None, "make", "alive")}
    assert all(each["since"] for each in seen)
    assert "; in no order" in table


def test_an_expired_lease_is_shown_with_the_command_that_reclaims_it(root: Path) -> None:
    assert holdfast("lease", "acquire", "--ttl", "200ms", cwd=root).returncode == 0
    wait_until(lambda: holdings(root)["lease main"]["reclaim"]["safe"])

    how = holdings(root)["lease main"]["reclaim"]["how"].split()[1:]

    assert holdfast(*how, cwd=root).returncode == 0
    assert holdings(root)["lease main"]["reclaim"]["safe"] is False


def test_an_issue_that_waits_for_its_gates_cannot_be_reclaimed(root: Path) -> None:
    holdfast("issue", "init", cwd=root)
    holdfast("gate", "define", "review", cwd=root)
    issue = holdfast("issue", "create", "x", "--gate", "review", "--field", "id", cwd=root).stdout.strip()
    claim = holdfast("issue", "claim", issue, "--ttl", "1h", "--field", "claim_id", cwd=root).stdout.strip()
    holdfast("issue", "finish", "--claim", claim, cwd=root)

    [seen] = holdings(root).values()
    assert (seen["reclaim"]["safe"], "waits for its gates" in seen["reclaim"]["how"]) == (False, True)
    assert holdfast("issue", "heartbeat", issue, "--claim", claim, "--ttl", "100ms", cwd=root).returncode == 0
    wait_until(lambda: not holdings(root))


def test_control_characters_in_a_purpose_do_not_reach_the_terminal(root: Path) -> None:
    nasty = "\x1b[31mred\x07\r\nforged line"
    assert holdfast("lease", "acquire", "--ttl", "1h", "--purpose", nasty, cwd=root).returncode == 0

    shown = holdfast("who", "--details", cwd=root).stdout

    assert "\x1b" not in shown
    assert "\x07" not in shown
    assert len(shown.splitlines()) == 2
    assert holdings(root)["lease main"]["purpose"] == nasty


def test_who_changes_nothing(root: Path) -> None:
    """Apart from the summaries of issues, which are a cache."""

    def everything() -> dict[str, bytes]:
        files = [path for path in sorted(root.rglob("*")) if path.is_file() and path.parent.name != "checkpoints"]
        return {str(path): path.read_bytes() for path in files}

    holdfast("issue", "init", cwd=root)
    holdfast("issue", "create", "x", cwd=root)
    before = everything()
    holdfast("who", cwd=root)

    assert everything() == before


def test_who_says_when_nothing_is_held_and_fails_outside_a_repository(root: Path, tmp_path: Path) -> None:
    assert holdfast("who", cwd=root).stdout == "Nobody holds anything.\n"
    assert holdfast("who", cwd=tmp_path).returncode == 3


def test_an_unreadable_record_is_not_reported_as_free(root: Path) -> None:
    (record,) = (root / ".jvs/worktrees/main").glob("config.json")
    record.write_text("{")

    for command in (["who"], ["top", "--limit", "1"]):
        told = holdfast(*command, cwd=root)
        assert "No visible holder." in told.stdout
        assert "Cannot list every lease" in told.stdout + told.stderr


def test_an_unreadable_claim_does_not_hide_others(root: Path) -> None:
    assert holdfast("issue", "init", cwd=root).returncode == 0
    ids = [holdfast("issue", "create", "x", "--field", "id", cwd=root).stdout.strip() for _ in range(2)]
    for each in ids:
        assert holdfast("issue", "claim", each, cwd=root).returncode == 0
    broken, whole = sorted(ids)
    (root / f".jit/claims/{broken}.json").write_text("{")
    (root / f".jit/issues/{whole}.json").write_text("{")

    seen = data(holdfast("who", "--json", cwd=root))
    assert [each["what"] for each in seen["holdings"]] == [whole]
    assert [each["kind"] for each in seen["unreadable"]] == ["issue"]
    assert broken in seen["unreadable"][0]["problem"]
    examined = error(holdfast("doctor", "--json", cwd=root))
    subjects = {each["subject"] for each in examined["findings"] if each["code"] == "issue-unreadable"}
    assert subjects == set(ids)


def test_an_unavailable_store_is_tried_only_once(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def unavailable(*_: object) -> NoReturn:
        asked.append(1)
        raise StoreUnavailable("etcd://nowhere/x", "no answer")

    monkeypatch.setattr(overview, "Repository", unavailable)
    monkeypatch.setattr(overview, "open_store", unavailable)
    seen = overview.look_around(root)

    assert len(asked) == 1
    assert {"lease", "operation"} <= {each.kind for each in seen.unreadable}
    assert "file lock" not in {each.kind for each in seen.unreadable}


def test_a_current_directory_that_is_gone_is_reported(root: Path, tmp_path: Path) -> None:
    (tmp_path / "gone").mkdir()
    for command in ("who", "ready", "guard f", "setup claude", "info"):
        program = f"rmdir ../gone; exec {sys.executable} -m holdfast {command} --json"
        told = subprocess.run(["sh", "-c", program], cwd=tmp_path / "gone", capture_output=True, text=True)
        (tmp_path / "gone").mkdir(exist_ok=True)
        assert error(told)["code"] == "E_NOT_FOUND", (command, told)
        assert "the current directory is gone" in error(told)["message"]


def test_a_directory_inside_a_repository_is_not_mistaken_for_it(root: Path) -> None:
    (root / "main/sub").mkdir()
    told = error(holdfast("info", "--json", "--repo", root / "main/sub"))
    assert told["code"] == "E_NOT_INITIALISED"
    assert str(root) in told["hint"]


def test_top_prints_one_json_object_per_refresh(root: Path) -> None:
    result = holdfast("top", "--limit", "3", "--every", "10ms", "--json", cwd=root)

    looks = [json.loads(line) for line in result.stdout.splitlines()]
    assert [each["data"]["holdings"] for each in looks] == [[], [], []]


# --- Liveness, waiters and reclaiming --------------------------------------------------------------------


@pytest.fixture
def busy(root: Path) -> Path:
    """A repository with an issue and a ledger."""
    for command in (["issue", "init"], ["ledger", "init"], ["issue", "create", "Work"]):
        assert holdfast(*command, cwd=root).returncode == 0
    return root


def the_only(root: Path, kind: str) -> Any:
    (found,) = (each for name, each in holdings(root).items() if name.startswith(f"{kind} "))
    return found


def test_a_claim_belongs_to_the_process_that_ran_the_command_and_shows_its_purpose(busy: Path) -> None:
    assert (
        holdfast("ledger", "claim", "1", "--actor", "bob", "--purpose", "parse", cwd=busy, as_child=True).returncode
        == 0
    )
    assert holdfast("ledger", "extend", "1", "--actor", "bob", "--ttl", "1h", cwd=busy, as_child=True).returncode == 0
    assert holdfast("issue", "claim-next", "--actor", "agent:a", cwd=busy, as_child=True).returncode == 0

    claim, issue = the_only(busy, "claim"), the_only(busy, "issue")

    assert (claim["liveness"], issue["liveness"]) == ("alive", "alive")
    assert (claim["purpose"], claim["time_left"] > 600) == ("parse", True)
    for each in (claim, issue):
        assert f":{os.getpid()}:" in each["process"]
        assert each["since"] < each["until"]
        assert each["reclaim"]["safe"] is False


def test_a_process_that_claimed_with_a_command_and_exited_is_not_reported_dead(busy: Path) -> None:
    """An agent may continue in another process: the claim belongs to any process that knows its id."""
    for command in (["ledger", "claim", "1", "--actor", "bob"], ["issue", "claim-next"]):
        program = f"import subprocess, sys; subprocess.run([sys.executable, '-m', 'holdfast', *{command!r}])"
        subprocess.run(python(program), cwd=busy, env=environment(), check=True, capture_output=True)

    assert the_only(busy, "claim")["liveness"] == "unknown"
    assert the_only(busy, "issue")["liveness"] == "unknown"


def test_a_process_that_held_a_claim_itself_and_was_killed_is_reported_dead(busy: Path) -> None:
    program = (
        "import time; from holdfast.repository.ledgers import open_ledger\n"
        f"with open_ledger({str(busy)!r}).claims.claim('1', 'bob', ttl=600):\n"
        "    print('held', flush=True); time.sleep(99)"
    )
    with subprocess.Popen(python(program), stdout=subprocess.PIPE, text=True) as library:
        assert library.stdout is not None
        assert library.stdout.readline() == "held\n"
        with Running("issue", "work", "--next", "--repo", busy, "--", "sleep", "99") as worker:
            # The lock files that the worker takes before it claims have `issue` in their names too.
            wait_until(lambda: any(name.startswith("issue ") for name in holdings(busy)))
            assert the_only(busy, "issue")["liveness"] == "alive"
            assert the_only(busy, "claim")["liveness"] == "alive"
            worker.kill()
            worker.process.wait()
        library.kill()
        library.wait()

    claim, issue = the_only(busy, "claim"), the_only(busy, "issue")

    assert (claim["liveness"], issue["liveness"]) == ("dead", "dead")
    assert (claim["reclaim"]["safe"], issue["reclaim"]["safe"]) == (False, False)
    assert "its process is gone" in claim["reclaim"]["how"]
    assert "its process is gone" in issue["reclaim"]["how"]


def test_records_of_earlier_versions_have_unknown_liveness(busy: Path) -> None:
    assert holdfast("issue", "claim-next", cwd=busy).returncode == 0
    (record,) = (busy / ".jit/claims").glob("*.json")
    old = json.loads(record.read_text())
    del old["claim"]["holder"]
    record.write_text(json.dumps(old))
    event = {"type": "lock_acquired", "node_id": "1", "owner": "bob", "expires_at": "2999-01-01T00:00:00Z"}
    for strange in ({}, {"holder": "somebody", "purpose": 3}, {"holder": {"pid": 1}}):
        append_raw(open_ledger(busy), {**event, **strange})
        assert (the_only(busy, "claim")["who"], the_only(busy, "claim")["liveness"]) == ("bob", "unknown")

    assert the_only(busy, "issue")["liveness"] == "unknown"


def test_waiters_for_a_claim_are_shown_in_queue_order(busy: Path) -> None:
    assert holdfast("ledger", "claim", "1", "--actor", "bob", cwd=busy).returncode == 0
    waits = ("ledger", "claim", "1", "--repo", busy, "--wait", "60s", "--actor")
    with Running(*waits, "carl"):
        wait_until(lambda: len(the_only(busy, "claim")["waiting"]) == 1)
        with Running(*waits, "dora", "--priority", "1"):
            wait_until(lambda: len(the_only(busy, "claim")["waiting"]) == 2)
            first, second = the_only(busy, "claim")["waiting"]

    assert [(each["who"], each["place"], each["liveness"]) for each in (first, second)] == [
        ("dora", 1, "alive"),
        ("carl", 2, "alive"),
    ]
    assert first["since"] > second["since"]


def waiters_with_times(waiting: list[Any]) -> list[Any]:
    """The waiters, once all of them show their start times; before that, an empty list."""
    return waiting if waiting and all(each["since"] for each in waiting) else []


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux shows the holders of a file lock")
def test_the_file_locks_of_all_programs_are_shown(root: Path) -> None:
    (root / "main/sub").mkdir()
    lock = root / "main/sub/build lock"
    program = (
        "import fcntl, sys, time; file = open(sys.argv[1], 'w'); fcntl.flock(file, fcntl.LOCK_EX)\n"
        "print('held', flush=True); time.sleep(99)"
    )
    with subprocess.Popen([*python(program), str(lock)], stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "held\n"
        with Running("lock", "run", lock, "--wait", "60s", "--", "true"):
            wait_until(lambda: waiters_with_times(the_only(root, "file lock")["waiting"]))
            held = the_only(root, "file lock")
            table = holdfast("who", "--details", "--repo", root).stdout
        other.kill()
        other.wait()

    assert (held["what"], held["who"]) == ("main/sub/build lock", f"pid {other.pid}")
    assert held["liveness"] == "alive"
    assert [each["place"] for each in held["waiting"]] == [None], "the kernel grants file locks in no defined order"
    assert f"pid {other.pid}" in table
    assert "(for " in table
    assert f"holdfast lock run '{lock}' --wait 10m" in held["reclaim"]["how"]
    assert not [each for each in holdings(root) if each.startswith("file lock")]


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux shows the holders of a file lock")
def test_a_fair_file_lock_is_one_row_with_its_queue(root: Path) -> None:
    lock = root / "main/build.lock"
    with Running("lock", "run", lock, "--fair", "--", "sleep", "99"):
        wait_until(lambda: "file lock main/build.lock" in holdings(root))
        waits = ("lock", "run", lock, "--fair", "--wait", "60s", "--", "true")
        with Running(*waits), Running(*waits):
            wait_until(lambda: len(waiters_with_times(the_only(root, "file lock")["waiting"])) == 2)
            held = the_only(root, "file lock")

    assert [each["place"] for each in held["waiting"]] == [1, None], "only the first place is known"
    assert "--fair" in held["reclaim"]["how"]


def test_the_ledger_lock_is_shown_with_its_age_and_the_command_that_breaks_it(busy: Path) -> None:
    record = {"agent_id": "agent-7", **current_holder()._replace(start_time="1").as_record()}
    (busy / "ledger/ledger.lock").write_text(json.dumps(record))

    held = the_only(busy, "ledger lock")

    assert (held["liveness"], held["purpose"], held["reclaim"]["safe"]) == ("dead", "agent-7", True)
    assert held["since"] is not None
    command = held["reclaim"]["how"].partition("; or ")[2].split()[1:]
    assert holdfast(*command).returncode == 0
    assert "ledger lock" not in str(list(holdings(busy)))


def test_an_ordinary_directory_named_ledger_is_not_taken_for_a_ledger(tmp_path: Path) -> None:
    (tmp_path / "ledger").mkdir()
    (tmp_path / "ledger/accounts.txt").touch()
    (tmp_path / "below").mkdir()

    assert holdfast("who", cwd=tmp_path / "below").returncode == 3

    assert holdfast("ledger", "init", "--repo", tmp_path).returncode == 0
    assert holdfast("who", cwd=tmp_path / "below").returncode == 0


@pytest.mark.skipif(sys.platform != "linux", reason="needs a Linux pseudo-terminal")
def test_a_narrow_table_first_loses_the_columns_without_content() -> None:
    cells = ("agent:weaver", "work", "", "2m", "40s", "alive", "", "")
    (header, row) = table(AGENT_COLUMNS, [[Span(each) for each in cells]], 60)
    assert "".join(each.text for each in header).split() == ["ACTOR", "WORK", "SINCE", "LEFT", "ALIVE"]
    assert "agent:weaver" in "".join(each.text for each in row)
    (header, _) = table(AGENT_COLUMNS, [[Span(each) for each in cells]], 100)
    assert len("".join(each.text for each in header).split()) == 9, "there is room for all"


def test_a_narrow_terminal_gets_lines_that_fit_and_a_wide_one_a_table(root: Path) -> None:
    nasty = "\x1b[31mred\x07"
    assert holdfast("lease", "acquire", "--ttl", "1h", "--purpose", nasty, cwd=root).returncode == 0

    narrow = on_a_terminal("who", "--details", "--repo", root, columns=60)
    wide = on_a_terminal("who", "--details", "--repo", root, columns=250, NO_COLOR="1")

    assert max(map(len, narrow.splitlines())) <= 60
    assert "  held by    " in narrow
    assert len(wide.strip().splitlines()) == 2
    for drawn in (narrow, wide):
        assert "\\x1b[31mred\\x07" in drawn
        assert "\x1b[31m" not in drawn
        assert "lease acquire --worktree main" in " ".join(drawn.split())


@pytest.mark.skipif(sys.platform != "linux", reason="needs a Linux pseudo-terminal")
def test_an_agent_is_one_row_in_colour_and_a_narrow_terminal_gets_fewer_columns(root: Path) -> None:
    nasty = "\x1b[31mred\x07 and a purpose that is longer than a narrow terminal"
    env = {"HOLDFAST_ACTOR": "agent:a"}
    assert holdfast("lease", "acquire", "--ttl", "1h", "--purpose", nasty, cwd=root, env=env).returncode == 0

    narrow = on_a_terminal("who", "--repo", root, columns=40, NO_COLOR="1")
    wide = on_a_terminal("who", "--repo", root, columns=150)
    piped = holdfast("who", "--repo", root).stdout

    assert len(narrow.strip().splitlines()) == len(wide.strip().splitlines()) == len(piped.splitlines()) == 2
    assert max(map(len, narrow.splitlines())) <= 40
    assert ("SINCE" in narrow, "SINCE" in wide, "ALIVE" in narrow) == (False, True, True)
    assert "\x1b[1magent:a" in wide
    assert "\\x1b[31mred\\x07" in wide
    assert "\x1b" not in narrow + piped


@pytest.mark.skipif(sys.platform != "linux", reason="needs a Linux pseudo-terminal")
def test_what_needs_attention_comes_first_with_the_command_for_it(root: Path) -> None:
    assert holdfast("lease", "acquire", "--ttl", "200ms", cwd=root).returncode == 0
    wait_until(lambda: holdings(root)["lease main"]["reclaim"]["safe"])

    first, *_ = holdfast("who", "--repo", root).stdout.splitlines()

    assert "let the lease main expire" in first
    assert first.endswith("holdfast lease steal --worktree main")


def test_a_named_directory_without_a_repository_is_an_error(root: Path, tmp_path: Path) -> None:
    for named in (tmp_path, tmp_path / "absent", root / "main"):
        assert error(holdfast("who", "--json", "--repo", named))["code"] == "E_NOT_INITIALISED", named


def test_an_operation_whose_process_died_is_finished_by_the_suggested_command(root: Path) -> None:
    program = (
        "import os, signal; from holdfast.repository.repository import Repository\n"
        "from holdfast.repository import home\n"
        "home.move = lambda *given: os.kill(os.getpid(), signal.SIGKILL)\n"
        f"Repository({str(root)!r}).worktrees.create('begun')"
    )
    subprocess.run(python(program), check=False)

    held = the_only(root, "operation")

    assert (held["what"], held["purpose"], held["liveness"]) == ("begun", "create", "dead")
    assert held["since"] is not None
    assert held["reclaim"]["safe"] is True
    assert holdfast(*held["reclaim"]["how"].split()[1:], cwd=root).returncode == 0
    assert "operation" not in str(list(holdings(root)))
