"""`holdfast agent run`: complete assignments, and recovery from a crash in the middle of one."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from holdfast.leases.rules import LeaseKeys
from holdfast.repository.repository import Repository
from proof.effort import until
from tests.cli.commands import (
    HOLDFAST,
    Running,
    data,
    envelope,
    error,
    holdfast,
    python,
    stop_between_commits,
    wait_until,
    wait_until_idle,
)
from tests.repository.stages import files_stored
from tests.support.homes import make_repository

pytestmark = pytest.mark.both_homes

if sys.platform == "win32":
    pytest.skip("needs POSIX signals", allow_module_level=True)

WRITE = python("import os; open('result', 'a').write(os.environ['HOLDFAST_ISSUE_ID'])")


@pytest.fixture
def shop(tmp_path: Path) -> Path:
    """A repository with a tracker and a ledger."""
    root = tmp_path / "shop"
    make_repository(root)
    assert holdfast("issue", "init", cwd=root).returncode == 0
    assert holdfast("ledger", "init", cwd=root).returncode == 0
    return root


def create(shop: Path, title: str, *options: str) -> str:
    result = holdfast("issue", "create", title, *options, "--field", "id", cwd=shop)
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


def state_of(shop: Path, issue: str) -> str:
    return holdfast("issue", "show", issue, "--field", "state", cwd=shop).stdout.strip()


def ledger_of(shop: Path) -> list[dict[str, Any]]:
    return [each["event"] for each in data(holdfast("ledger", "log", "--json", cwd=shop))["events"]]


def outcome(result: Any) -> Any:
    """The outcome that `agent run --json` prints on standard error: standard output belongs to the command."""
    content = envelope(result.stderr)
    assert content["ok"] is True, content
    return content["data"]


def test_work_that_succeeds_is_done_although_no_snapshot_can_be_taken(shop: Path) -> None:
    issue = create(shop, "Write the result")
    prevent = f"echo work > result; rm -rf {shop}/.jvs/tmp; touch {shop}/.jvs/tmp"

    result = holdfast("agent", "run", "--next", "--json", "--", "sh", "-c", prevent, cwd=shop)

    told = error(result, on="stderr")
    assert result.returncode == 1
    assert told["code"] == "E_IO"
    assert (told["issue_id"], told["state"], told["snapshot_id"]) == (issue, "done", None)
    assert state_of(shop, issue) == "done"
    [worktree] = (shop / "worktrees").iterdir()
    assert (worktree / "result").read_text() == "work\n"
    (shop / ".jvs/tmp").unlink()
    assert holdfast("snapshot", "--worktree", worktree.name, cwd=shop).returncode == 0


def test_people_are_told_that_work_is_not_saved(shop: Path) -> None:
    create(shop, "Write the result")
    prevent = f"rm -rf {shop}/.jvs/tmp; touch {shop}/.jvs/tmp result"

    told = holdfast("agent", "run", "--next", "--", "sh", "-c", prevent, cwd=shop).stderr

    assert "is done" in told
    assert "no snapshot of the work was taken. It is still in the worktree issue-" in told


def test_people_are_told_that_failed_work_is_not_saved(shop: Path) -> None:
    create(shop, "Write the result")
    prevent = f"rm -rf {shop}/.jvs/tmp; touch {shop}/.jvs/tmp result; exit 9"

    ended = holdfast("agent", "run", "--next", "--", "sh", "-c", prevent, cwd=shop)

    assert ended.returncode == 9
    assert "is back in the queue; no snapshot of the work was taken: " in ended.stderr


@pytest.mark.parametrize("command", [["agent", "run", "--next"], ["run", "--snapshot"]], ids=" ".join)
def test_the_consistency_of_the_snapshot_can_be_chosen(shop: Path, command: list[str]) -> None:
    create(shop, "Write the result")
    for wanted in ("best_effort", "quiesced"):
        result = holdfast(*command, "--consistency", wanted, "--json", "--", "touch", wanted, cwd=shop)
        saved = outcome(result)["snapshot_id"]
        assert data(holdfast("show", saved, "--json", cwd=shop))["consistency_level"] == wanted
        create(shop, "Write another")


LEAVE_A_WRITER = """
import os, subprocess, sys
for each in range(200):
    open(f'file-{each}', 'w').write('work')
writer = '''
import itertools, os
for each in itertools.count():
    with open(f'file-{each % 200}', 'w') as file:
        file.write(str(each))
'''
program = f'import os; print(os.getpid(), flush=True)\\n{writer}'
subprocess.Popen([sys.executable, '-c', program], stdout=open(sys.argv[1], 'w'), start_new_session=True)
while not os.path.getsize(sys.argv[1]):
    pass
"""


def test_success_is_saved_as_best_effort_although_a_process_keeps_writing(shop: Path, tmp_path: Path) -> None:
    """On a busy machine, the process may happen not to write while the snapshot is taken."""
    warnings: list[str] = []
    for number in until(lambda: warnings, 1, most=20):
        issue, pid = create(shop, "Write the result"), tmp_path / f"pid-{number}"
        command = [*python(LEAVE_A_WRITER), str(pid)]
        try:
            result = holdfast("agent", "run", "--next", "--json", "--", *command, cwd=shop)
            told = outcome(result)
        finally:
            os.kill(int(pid.read_text()), signal.SIGKILL)
        assert (told["issue_id"], told["state"], told["not_saved"]) == (issue, "done", None)
        if told["warning"]:
            warnings.append(told["warning"])
    assert "kept writing" in warnings[0]
    assert envelope(result.stderr)["warnings"] == [told["warning"]]
    shown = data(holdfast("show", told["snapshot_id"], "--json", cwd=shop))
    assert (shown["consistency_level"], shown["files"]) == ("best_effort", 200)
    assert ledger_of(shop)[-1]["warning"] == told["warning"]


def test_successful_work_is_snapshotted_recorded_and_done(shop: Path) -> None:
    issue = create(shop, "Write the result")

    result = holdfast("agent", "run", "--next", "--actor", "agent:a", "--json", "--", *WRITE, cwd=shop)

    told = outcome(result)
    assert (told["issue_id"], told["state"], told["succeeded"]) == (issue, "done", True)
    assert state_of(shop, issue) == "done"
    written = shop / "worktrees" / told["worktree"] / "result"
    assert written.read_text() == issue
    assert files_stored(Repository(shop).context, told["snapshot_id"])["result"] == issue
    event = ledger_of(shop)[-1]
    assert (event["type"], event["issue_id"], event["assignee"]) == ("work_done", issue, "agent:a")
    assert data(holdfast("who", "--json", cwd=shop))["holdings"] == []


@pytest.mark.plain_home("an agent starts at the commit of main")
def test_an_agent_does_not_start_in_an_empty_worktree_while_main_has_unsaved_files(shop: Path) -> None:
    (shop / "main/file").write_text("content")
    issue = create(shop, "Change the file")

    refused = holdfast("agent", "run", "--next", "--json", "--", *WRITE, cwd=shop)
    assert error(refused, on="stderr")["code"] == "E_REFUSED"
    assert state_of(shop, issue) == "ready"
    assert holdfast("snapshot", cwd=shop).returncode == 0
    assert holdfast("agent", "run", "--next", "--", *WRITE, cwd=shop).returncode == 0
    assert (shop / "worktrees" / f"issue-{issue[:8]}" / "file").read_text() == "content"


def test_failed_work_becomes_ready_again_and_its_files_are_kept(shop: Path) -> None:
    issue = create(shop, "Fail")
    program = python("import sys; open('half', 'w').write('half'); sys.exit(3)")

    result = holdfast("agent", "run", "--issue", issue[:8], "--json", "--", *program, cwd=shop)

    assert result.returncode == 3
    told = outcome(result)
    assert (told["state"], told["succeeded"]) == ("ready", False)
    assert files_stored(Repository(shop).context, told["snapshot_id"])["half"] == "half"
    assert ledger_of(shop)[-1]["type"] == "work_failed"
    again = holdfast("agent", "run", "--next", "--json", "--", *WRITE, cwd=shop)
    assert outcome(again)["worktree"] == told["worktree"]
    assert state_of(shop, issue) == "done"


def test_the_gate_passes_or_fails_with_the_command(shop: Path) -> None:
    assert holdfast("gate", "define", "tests", "--title", "Tests", cwd=shop).returncode == 0
    good, bad = (create(shop, title, "--gate", "tests") for title in ("Good", "Bad"))

    holdfast("agent", "run", "--issue", good, "--gate", "tests", "--", "true", cwd=shop)
    holdfast("agent", "run", "--issue", bad, "--gate", "tests", "--", "false", cwd=shop)

    assert state_of(shop, good) == "done"
    shown = data(holdfast("issue", "show", bad, "--json", cwd=shop))
    assert shown["gates_status"]["tests"]["status"] == "failed"


def test_without_a_ready_issue_the_exit_status_is_not_found(shop: Path) -> None:
    result = holdfast("agent", "run", "--next", "--json", "--", "true", cwd=shop)

    assert result.returncode == 3
    assert error(result, on="stderr")["code"] == "E_NOT_FOUND"


def test_the_work_of_a_killed_agent_is_taken_over_and_nothing_is_lost(shop: Path) -> None:
    issue = create(shop, "Survive")
    program = python("import time; open('half', 'w').write('half'); print('at work', flush=True); time.sleep(99)")
    with Running("agent", "run", "--next", "--repo", shop, "--ttl", "1s", "--", *program) as first:
        assert first.hear() == "at work"
        first.kill()
        first.process.wait()

    def taken_over() -> bool:
        result = holdfast("agent", "run", "--next", "--ttl", "5s", "--wait", "20s", "--json", "--", *WRITE, cwd=shop)
        return result.returncode == 0

    wait_until(taken_over)
    assert state_of(shop, issue) == "done"
    history = data(holdfast("history", "--worktree", f"issue-{issue[:8]}", "--json", cwd=shop))
    kept = [each["snapshot_id"] for each in history["snapshots"]]
    names = {name for each in kept for name in files_stored(Repository(shop).context, each)}
    assert sorted(names) == ["half", "result"]


def test_an_agent_terminated_while_waiting_for_the_worktree_releases_its_issue(shop: Path) -> None:
    issue = create(shop, "Interrupted")
    assert holdfast("worktree", "create", "other", cwd=shop).returncode == 0
    assert holdfast("lease", "acquire", "--worktree", "other", "--ttl", "10m", cwd=shop).returncode == 0
    store, queue = Repository(shop).context.store, LeaseKeys.of("other").queue
    arguments = ["--next", "--repo", str(shop), "--worktree", "other", "--wait", "forever", "--ttl", "10m"]
    with Running("agent", "run", *arguments, "--", *WRITE) as waiting:
        wait_until(lambda: store.read(queue))
        wait_until_idle(waiting.pid)
        waiting.send(signal.SIGTERM)
        waiting.process.wait()
    assert state_of(shop, issue) == "ready"
    assert store.read(queue) is None


def test_an_agent_paused_past_its_lease_publishes_nothing_when_it_resumes(shop: Path) -> None:
    issue = create(shop, "Once")
    ttl = "1s"
    program = python("print('at work', flush=True); import sys; sys.stdin.read(); open('late', 'w')")
    with Running(
        "agent",
        "run",
        "--next",
        "--actor",
        "agent:slow",
        "--repo",
        shop,
        "--ttl",
        ttl,
        "--json",
        "--",
        *program,
    ) as slow:
        assert slow.hear() == "at work"
        stop_between_commits(slow.pid)
        wait_until(
            lambda: (
                holdfast(
                    *("agent", "run", "--next", "--actor", "agent:quick", "--ttl", "5s"),
                    *("--wait", "20s", "--worktree", "other", "--", *WRITE),
                    cwd=shop,
                ).returncode
                == 0
            )
        )
        before = ledger_of(shop)
        slow.send(signal.SIGCONT)
        result = slow.finish()

    assert result.returncode == 5, result
    assert error(result, on="stderr")["code"] in ("E_FENCING_MISMATCH", "E_LOCK_EXPIRED", "E_LOCK_NOT_HELD")
    assert state_of(shop, issue) == "done"
    assert ledger_of(shop) == before
    assert [each["type"] for each in before] == ["work_done"]


def test_an_agent_may_finish_its_issue_itself(shop: Path) -> None:
    issue = create(shop, "Write the result")
    script = f"echo x > result; {shlex.join(HOLDFAST)} issue finish"

    told = outcome(holdfast("agent", "run", "--next", "--json", "--", "sh", "-c", script, cwd=shop))

    assert (told["state"], told["succeeded"], told["issue_id"]) == ("done", True, issue)
    assert [each["type"] for each in ledger_of(shop)] == ["work_done"]
    assert data(holdfast("show", told["snapshot_id"], "--json", cwd=shop))["worktree"] == told["worktree"]


def test_an_issue_released_by_the_agent_is_not_done_even_if_the_command_succeeds(shop: Path) -> None:
    issue = create(shop, "Write the result")
    script = f"echo half > result; {shlex.join(HOLDFAST)} issue release $HOLDFAST_ISSUE_ID"

    result = holdfast("agent", "run", "--next", "--json", "--", "sh", "-c", script, cwd=shop)

    told = outcome(result)
    assert (result.returncode, told["state"], told["succeeded"]) == (0, "ready", False)
    assert [each["type"] for each in ledger_of(shop)] == ["work_failed"]
    assert state_of(shop, issue) == "ready"


def test_a_command_that_continues_after_finishing_its_issue_is_not_terminated(shop: Path) -> None:
    create(shop, "Write the result")
    script = f"{shlex.join(HOLDFAST)} issue finish; sleep 2; echo late > result"

    told = outcome(holdfast("agent", "run", "--next", "--ttl", "3s", "--json", "--", "sh", "-c", script, cwd=shop))

    assert (told["state"], told["succeeded"]) == ("done", True)
    assert (shop / "worktrees" / told["worktree"] / "result").read_text() == "late\n"


def test_the_issue_and_its_outcome_are_reported_on_standard_error(shop: Path) -> None:
    issue = create(shop, "Write the result")

    failed = holdfast("agent", "run", "--next", "--", "sh", "-c", "echo out; exit 3", cwd=shop)
    done = holdfast("agent", "run", "--next", "--", *WRITE, cwd=shop)

    assert (failed.returncode, failed.stdout) == (3, "out\n")
    name = f"holdfast: {issue[:8]} (Write the result)"
    place = shop / "worktrees" / f"issue-{issue[:8]}"
    assert failed.stderr.splitlines() == [f"{name} in {place}", f"{name} is back in the queue"]
    assert done.stderr.splitlines()[1].startswith(f"{name} is done; saved as the snapshot ")


def test_agents_that_wait_for_work_run_until_everything_is_done(shop: Path) -> None:
    first = create(shop, "first")
    create(shop, "second", "--depends-on", first)
    create(shop, "third", "--depends-on", first)
    work = "agent run --next --wait forever -- sh -c 'sleep 0.2; echo x > $HOLDFAST_ISSUE_ID'"
    loop = f"while {shlex.join(HOLDFAST)} {work}; do echo one; done 2>> log"

    running = [subprocess.Popen(["sh", "-c", loop], cwd=shop, stdout=subprocess.PIPE, text=True) for _ in "ab"]
    told = [each.communicate(timeout=120)[0].split() for each in running]

    assert sum(map(len, told)) == 3
    assert [each["type"] for each in ledger_of(shop)] == ["work_done"] * 3
    assert "no issue is ready" in (shop / "log").read_text()
    refused = holdfast("agent", "run", "--next", "--patience", "1s", "--", "true", cwd=shop)
    assert (refused.returncode, "it is now --wait" in refused.stderr) == (2, True)


def test_an_issue_whose_gate_failed_can_be_taken_by_another_agent(shop: Path) -> None:
    check = 'cd "worktrees/issue-${HOLDFAST_ISSUE_ID%%-*}" && grep -q right result'
    assert holdfast("gate", "define", "tests", "--checker", check, cwd=shop).returncode == 0
    issue = create(shop, "Write the result", "--gate", "tests")

    told = outcome(holdfast("agent", "run", "--next", "--json", "--", "sh", "-c", "echo wrong > result", cwd=shop))
    assert (told["state"], told["succeeded"]) == ("gated", True)
    assert holdfast("gate", "check", issue, cwd=shop).returncode == 1
    assert holdfast("issue", "update", issue, "--state", "ready", cwd=shop).returncode == 0
    again = (
        "agent",
        "run",
        "--next",
        "--actor",
        "agent:b",
        "--json",
        "--",
        "sh",
        "-c",
        "echo right > result",
    )
    assert outcome(holdfast(*again, cwd=shop))["state"] == "gated"
    assert holdfast("gate", "check", issue, cwd=shop).returncode == 0
    assert state_of(shop, issue) == "done"


def run_removing_worktree(shop: Path, *command: str) -> Any:
    """Run an agent with `--remove-worktree`."""
    run = ("agent", "run", "--next", "--remove-worktree", "--json", "--", *command)
    return outcome(holdfast(*run, cwd=shop))


def pinned(shop: Path) -> list[str]:
    return [each["snapshot_id"] for each in data(holdfast("pin", "list", "--json", cwd=shop))["pins"]]


def test_the_worktree_of_finished_work_is_removed_on_request_and_a_pin_keeps_its_snapshot(shop: Path) -> None:
    issue = create(shop, "Write the result")
    told = run_removing_worktree(shop, *WRITE)
    assert (told["state"], told["worktree_removed"], told["worktree_kept"]) == ("done", True, None)
    assert [each.name for each in (shop / "worktrees").glob("*")] == []
    assert set(pinned(shop)) == {told["snapshot_id"]}
    assert data(holdfast("who", "--json", cwd=shop))["holdings"] == []
    assert holdfast("gc", "policy", "--keep-last", "1", cwd=shop).returncode == 0
    assert "nothing to delete" in holdfast("gc", "plan", cwd=shop).stdout
    assert files_stored(Repository(shop).context, told["snapshot_id"])["result"] == issue
    assert holdfast("doctor", cwd=shop).returncode == 0


def test_the_worktree_of_unfinished_work_is_kept(shop: Path) -> None:
    assert holdfast("gate", "define", "review", cwd=shop).returncode == 0
    create(shop, "Write the result", "--gate", "review")
    told = run_removing_worktree(shop, *WRITE)
    assert (told["state"], told["worktree_removed"]) == ("gated", False)
    assert "gated" in told["worktree_kept"]
    create(shop, "Fail")
    failed = run_removing_worktree(shop, "false")
    assert (failed["state"], failed["worktree_removed"]) == ("ready", False)
    assert len(list((shop / "worktrees").glob("*"))) == 2
    assert pinned(shop) == []
    assert holdfast("agent", "run", "--next", "--remove-worktree", "--worktree", "x", cwd=shop).returncode == 2


def test_the_claim_and_the_lease_of_a_killed_agent_last_15_seconds_at_most(shop: Path) -> None:
    create(shop, "Be killed")
    show = shlex.join((*HOLDFAST, "who", "--json"))
    result = holdfast("agent", "run", "--next", "--", "sh", "-c", show, cwd=shop)
    assert result.returncode == 0, result.stderr
    held = {each["kind"]: each["time_left"] for each in data(result)["holdings"]}
    assert held.keys() == {"lease", "issue"}
    assert max(held.values()) <= 15


def test_a_worktree_with_a_process_left_in_it_is_kept(shop: Path, tmp_path: Path) -> None:
    create(shop, "Leave something running")
    program = f"""
import subprocess
left = subprocess.Popen(["sleep", "600"], start_new_session=True, stdin=-3, stdout=-3, stderr=-3)
open({str(tmp_path / "pid")!r}, "w").write(str(left.pid))
open("result", "w").write("done")
"""
    try:
        told = run_removing_worktree(shop, *python(program))
        assert (told["state"], told["worktree_removed"]) == ("done", False)
        assert (tmp_path / "pid").read_text() in told["worktree_kept"]
        assert (shop / "worktrees" / told["worktree"] / "result").read_text() == "done"
        assert pinned(shop) == []
    finally:
        os.kill(int((tmp_path / "pid").read_text()), signal.SIGKILL)


def test_the_parts_of_an_agent_run_share_one_connection(tmp_path: Path, postgres_url: str) -> None:
    root, store = tmp_path / "repository", f"{postgres_url}&application_name=agents"
    data(holdfast("init", root, "--store", store, "--json"))
    data(holdfast("issue", "init", "--repo", root, "--json"))
    data(holdfast("ledger", "init", "--repo", root, "--json"))
    data(holdfast("issue", "create", "Title", "--repo", root, "--json"))
    count = "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'agents'"
    code = f"""
import psycopg, time
connection, deadline = psycopg.connect({postgres_url.partition("?")[0]!r}, autocommit=True), time.monotonic() + 30
while (found := connection.execute({count!r}).fetchone()[0]) != 1 and time.monotonic() < deadline:
    time.sleep(0.02)  # those of the commands before end, and one that two renewals needed at the same time
print(found)
"""

    done = holdfast("agent", "run", "--next", "--ttl", "9s", "--repo", root, "--", sys.executable, "-c", code)
    assert (done.returncode, done.stdout.strip()) == (0, "1"), done.stderr
