"""`holdfast run`: a command under the lease of a worktree."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from itertools import count
from pathlib import Path

import pytest

from holdfast.clock import parse_instant
from holdfast.leases.rules import LeaseKeys
from holdfast.locks.process_tree import Mark, ProcessTree
from holdfast.repository.repository import Repository
from tests.cli.commands import (
    HOLDFAST,
    LISTENING,
    UNTIL_STDIN_ENDS,
    Running,
    data,
    died_of,
    environment,
    error,
    holdfast,
    is_gone,
    python,
    wait_until,
)
from tests.repository.stages import expire, files_stored, make_repository
from tests.support.homes import records_of

pytestmark = [
    pytest.mark.both_homes,
    pytest.mark.skipif(sys.platform == "win32", reason="needs POSIX signals"),
]


@pytest.fixture
def repo(scratch: Path) -> Path:
    make_repository(scratch / "repo")
    return scratch / "repo"


def is_free(repo: Path) -> bool:
    return Repository(repo).leases.state("main") is None


def outcome(stderr: str) -> dict[str, object]:
    """The outcome that `run --json` printed as the last line of standard error."""
    envelope = json.loads(stderr.splitlines()[-1])
    assert envelope["ok"], envelope
    return dict(envelope["data"])


def test_the_command_holds_the_lease_and_gets_it_in_its_environment(repo: Path) -> None:
    program = "import os, json; print(json.dumps({k: v for k, v in os.environ.items() if 'HOLDFAST' in k}))"
    result = holdfast("run", "--json", "--purpose", "tests", "--", *python(program), cwd=repo)
    assert result.returncode == 0, result.stderr
    told, said = json.loads(result.stdout), outcome(result.stderr)
    assert told["HOLDFAST_REPO"] == str(records_of(repo))
    assert told["HOLDFAST_WORKTREE"] == said["worktree"] == "main"
    assert told["HOLDFAST_LOCK_ID"] == said["lock_id"]
    assert told["HOLDFAST_TOKEN"] == str(said["token"]) == "1"
    assert is_free(repo)


def test_holdfast_commands_run_by_the_command_use_its_lease(repo: Path, scratch: Path) -> None:
    renew = " ".join((*HOLDFAST, "lease", "renew", "--json"))
    result = holdfast("run", "--worktree", "main", "--repo", repo, "--", "sh", "-c", renew, cwd=scratch)
    assert data(result)["worktree"] == "main"


def test_a_command_that_waits_for_its_own_lease_is_refused(repo: Path) -> None:
    for command in (["run", "--wait", "forever", "--", "true"], ["lease", "acquire", "--wait", "forever"]):
        result = holdfast("run", "--", *HOLDFAST, *command, cwd=repo)
        assert result.returncode == 4
        assert "you already hold the lease of main" in result.stderr
    assert is_free(repo)


def test_others_are_refused_while_the_command_runs_and_are_shown_it(repo: Path) -> None:
    with Running("run", "--repo", repo, "--", *UNTIL_STDIN_ENDS) as running:
        assert running.hear() == "running"
        told = error(holdfast("lease", "acquire", "--json", cwd=repo))
        assert told["code"] == "E_LOCK_CONFLICT"
        assert "echo running" in told["purpose"]
        assert told["liveness"] == "alive"
        assert told["holder_id"].split(":")[2] == str(running.pid)
        assert running.finish().returncode == 0
    assert is_free(repo)


def test_the_lease_is_renewed_for_as_long_as_the_command_runs(repo: Path) -> None:
    leases = Repository(repo).leases
    with Running("run", "--repo", repo, "--ttl", "1s", "--", *UNTIL_STDIN_ENDS) as running:
        assert running.hear() == "running"
        first = leases.state("main")
        assert first is not None
        for _ in range(4):
            before = leases.state("main")
            assert before is not None
            wait_until(lambda before=before: leases.state("main") != before)  # type: ignore[misc]
        assert running.process.poll() is None
        last = leases.state("main")
        assert last is not None
        assert last.lease.lock_id == first.lease.lock_id
        assert running.finish().returncode == 0


def test_a_killed_run_blocks_others_for_15_seconds_at_most(repo: Path) -> None:
    with Running("run", "--repo", repo, "--", *UNTIL_STDIN_ENDS) as running:
        assert running.hear() == "running"
        running.send(signal.SIGKILL)
        assert died_of(running.finish()) is signal.SIGKILL
    at = time.time()
    told = error(holdfast("snapshot", "--json", cwd=repo))
    assert (told["code"], told["liveness"]) == ("E_LOCK_CONFLICT", "dead")
    assert f"becomes free at {told['free_at']}" in told["message"]
    assert parse_instant(told["free_at"]) - at <= 15


@pytest.mark.parametrize("status", [0, 3, 75])
def test_the_exit_status_is_that_of_the_command(repo: Path, status: int) -> None:
    result = holdfast("run", "--", *python(f"raise SystemExit({status})"), cwd=repo)
    assert (result.returncode, result.stdout, result.stderr) == (status, "", "")
    assert is_free(repo)


def test_run_dies_of_the_signal_that_killed_the_command(repo: Path) -> None:
    result = holdfast("run", "--", *python("import os; os.kill(os.getpid(), 15)"), cwd=repo)
    assert died_of(result) is signal.SIGTERM
    assert is_free(repo)


def test_each_signal_reaches_the_command_once_despite_the_heartbeat(repo: Path) -> None:
    with Running("run", "--repo", repo, "--ttl", "600ms", "--", *python(LISTENING)) as running:
        assert running.hear() == "running"
        for _ in range(20):
            for name in ("SIGTERM", "SIGHUP", "SIGUSR1", "SIGINT"):
                running.send(signal.Signals[name])
                assert running.hear() == name
        assert running.finish().returncode == 0
    assert is_free(repo)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_waiter_that_is_terminated_leaves_the_queue(repo: Path, number: signal.Signals) -> None:
    repository = Repository(repo)
    queue = LeaseKeys.of("main").queue
    with repository.lease() as held:
        with Running("run", "--repo", repo, "--wait", "forever", "--", "true") as waiting:
            wait_until(lambda: repository.context.store.read(queue))
            waiting.send(number)
            result = waiting.finish()
        assert repository.context.store.read(queue) is None
        held.check()
    assert died_of(result) is signal.SIGTERM or result.returncode == 130


def test_a_command_that_does_not_exist_leaves_no_lease_behind(repo: Path) -> None:
    result = holdfast("run", "--json", "--", "there-is-no-such-command", cwd=repo)
    assert (result.returncode, json.loads(result.stderr)["error"]["code"]) == (127, "E_COMMAND_NOT_FOUND")
    assert is_free(repo)


def test_the_command_starts_in_the_worktree_unless_told_otherwise(repo: Path) -> None:
    inside = holdfast("run", "--", "pwd", cwd=repo)
    outside = holdfast("run", "--no-chdir", "--", "pwd", cwd=repo)
    forgotten = holdfast("run", "ls", "-l", cwd=repo)

    assert (inside.stdout.strip(), outside.stdout.strip()) == (str(repo / "main"), str(repo))
    assert forgotten.returncode == 2
    assert "Put '--' before the command: -- ls -l" in forgotten.stderr


@pytest.mark.req("LC-12")
def test_a_command_whose_lease_is_lost_is_terminated(repo: Path) -> None:
    program = (
        "import signal, sys, time\n"
        "def end(*_): print('asked to end', flush=True); sys.exit(0)\n"
        "signal.signal(signal.SIGTERM, end); print('running', flush=True); time.sleep(600)"
    )
    repository = Repository(repo)
    with Running("run", "--repo", repo, "--ttl", "4s", "--json", "--", *python(program)) as running:
        assert running.hear() == "running"
        expire(repository)
        thief = repository.steal("main", ttl=600)
        assert running.hear() == "asked to end"
        result = running.finish()
    assert result.returncode == 5
    assert json.loads(result.stderr)["error"]["code"] in ("E_LOCK_NOT_HELD", "E_LOCK_EXPIRED")
    state = repository.leases.state("main")
    assert state is not None
    assert state.lease.lock_id == thief.lease.lock_id, "the lease of the thief was changed"


@pytest.mark.req("LC-12")
def test_a_command_that_ignores_the_request_to_terminate_is_killed(repo: Path) -> None:
    stubborn = (
        "import os, signal, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: print('refused', flush=True))\n"
        "print(os.getpid(), flush=True)\n"
        "while True: time.sleep(600)"
    )
    arguments = ["run", "--repo", str(repo), "--ttl", "4s", "--json", "--", *python(stubborn)]
    with_short_grace = (
        "import sys; from holdfast.cli import child; child.GRACE = 0.5; "
        f"from holdfast.cli.entry import run; sys.exit(run({arguments!r}))"
    )
    with subprocess.Popen(
        python(with_short_grace), env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as running:
        assert running.stdout is not None
        pid = int(running.stdout.readline())
        expire(Repository(repo))
        assert running.stdout.readline() == "refused\n"
        _, stderr = running.communicate()
    assert running.returncode == 5
    assert json.loads(stderr)["error"]["code"] == "E_LOCK_EXPIRED"
    assert is_gone(pid)


WRITER = "import os, time; os.write(1, b'%d\\n' % os.getpid()); time.sleep(600)"
"""A process that stays in the worktree. It writes its line at once: two of them share a pipe."""
LEAVING = f"""
import os, sys
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.execv(sys.executable, [sys.executable, "-c", {WRITER!r}])
    os._exit(0)
os.wait()
"""


@pytest.mark.req("LC-12")
def test_the_descendants_of_a_command_are_terminated_with_it(repo: Path) -> None:
    """A shell that is terminated leaves its children behind, and they would go on writing."""
    script = '"$0" -c "$2"; "$0" -c "$1"; true'
    command = ["sh", "-c", script, sys.executable, WRITER, LEAVING]
    repository = Repository(repo)
    with Running("run", "--repo", repo, "--ttl", "15s", "--json", "--", *command) as running:
        pids = [int(running.hear()), int(running.hear())]
        expire(repository)
        repository.steal("main", ttl=600)
        assert running.finish().returncode == 5
        assert [is_gone(pid) for pid in pids] == [True, True]


def test_a_process_that_the_first_scan_missed_is_ended_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A scan is no snapshot: it misses a process that is just being started, whose parent then ends."""
    marked = {**os.environ, "HOLDFAST_TEST_MARK": str(tmp_path)}
    command = python(LEAVING)
    with subprocess.Popen(command, cwd=tmp_path, env=marked, stdout=subprocess.PIPE) as left_behind:
        assert left_behind.stdout is not None
        pid = int(left_behind.stdout.readline())
        left_behind.wait()
        scan, scans = ProcessTree._find, count()

        def missing_it(self: ProcessTree) -> None:
            if next(scans) > 0:
                scan(self)

        monkeypatch.setattr(ProcessTree, "_find", missing_it)
        ProcessTree(left_behind, Mark("HOLDFAST_TEST_MARK", str(tmp_path), tmp_path)).end(10.0)
        assert is_gone(pid)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux kills the command with its parent")
def test_when_run_is_killed_the_command_dies_and_the_lease_expires(repo: Path) -> None:
    program = "import os, time; print(os.getpid(), flush=True); time.sleep(600)"
    with Running("run", "--repo", repo, "--ttl", "2s", "--", *python(program)) as running:
        pid = int(running.hear())
        running.kill()
        running.process.wait()
        wait_until(lambda: is_gone(pid))
        told = error(holdfast("lease", "acquire", "--json", cwd=repo))
        assert (told["code"], told["liveness"]) == ("E_LOCK_CONFLICT", "dead")
    result = holdfast("run", "--wait", "20s", "--json", "--", "true", cwd=repo)
    assert outcome(result.stderr)["token"] == 2


def test_the_result_is_snapshotted_on_request_only_if_the_command_succeeds(repo: Path) -> None:
    write = "from pathlib import Path; Path('made').write_text('by the command')"
    options = ("--snapshot", "-m", "made", "--json", "--")
    result = holdfast("run", *options, *python(write), cwd=repo)
    saved = outcome(result.stderr)["snapshot_id"]
    assert isinstance(saved, str)
    repository = Repository(repo)
    assert repository.context.config("main").head_snapshot_id == saved
    assert files_stored(repository.context, (saved)) == {"made": "by the command"}
    failed = holdfast("run", *options, *python(f"{write}; raise SystemExit(1)"), cwd=repo)
    assert failed.returncode == 1
    assert outcome(failed.stderr)["snapshot_id"] is None
    assert Repository(repo).context.config("main").head_snapshot_id == saved
    assert is_free(repo)


@pytest.mark.req("LC-03")
def test_in_a_shared_worktree_the_command_runs_without_a_lease_and_run_says_so(repo: Path) -> None:
    holdfast("worktree", "create", "open", "--shared", cwd=repo)
    program = "import os; print(os.environ.get('HOLDFAST_LOCK_ID', 'none'))"
    result = holdfast("run", "--worktree", "open", "--", *python(program), cwd=repo)
    assert (result.returncode, result.stdout) == (0, "none\n")
    assert "high-risk" in result.stderr


def test_a_missing_worktree_is_reported_before_anything_runs(repo: Path) -> None:
    result = holdfast("run", "--worktree", "nowhere", "--json", "--", "touch", repo / "ran", cwd=repo)
    assert (result.returncode, json.loads(result.stderr)["error"]["code"]) == (3, "E_NOT_FOUND")
    assert not (repo / "ran").exists()


def test_run_reports_the_snapshot_and_a_command_that_runs_outside_the_worktree(repo: Path) -> None:
    told = holdfast("run", "--repo", repo, "--snapshot", "--no-chdir", "--", "true", cwd=repo)
    inside = holdfast("run", "--snapshot", "--", "true", cwd=repo / "main")
    quiet = holdfast("run", "--snapshot", "--no-chdir", "--json", "--", "true", cwd=repo)

    assert "outside main" in told.stderr
    assert inside.stderr.startswith("holdfast: saved main as the snapshot ")
    assert (len(inside.stderr.splitlines()), len(quiet.stderr.splitlines())) == (1, 1)


def test_a_command_runs_under_a_named_lease_where_it_was_started(repo: Path) -> None:
    program = "import os, json; print(json.dumps({**{k: v for k, v in os.environ.items() if 'HOLDFAST' in k}, "
    program += "'here': os.getcwd()}))"
    here = repo / "main"
    outer = {"HOLDFAST_LOCK_ID": "of-a-worktree", "HOLDFAST_WORKTREE": "main"}
    result = holdfast("run", "--name", "job", "--json", "--", *python(program), cwd=here, env=outer)
    assert result.returncode == 0, result.stderr
    told, said = json.loads(result.stdout), outcome(result.stderr)
    assert told["here"] == str(here)
    assert (told["HOLDFAST_LEASE_NAME"], told["HOLDFAST_LEASE_TOKEN"]) == ("job", "1")
    assert told["HOLDFAST_LEASE_ID"] == said["lock_id"]
    assert (said["name"], said["worktree"]) == ("job", None)
    assert told["HOLDFAST_LOCK_ID"] == "of-a-worktree", "the lease of a worktree is handed on"
    assert list(Repository(repo).named_leases.states()) == []


def test_two_commands_under_one_name_do_not_run_at_once(repo: Path) -> None:
    with Running("run", "--repo", repo, "--name", "job", "--", *UNTIL_STDIN_ENDS) as first:
        assert first.hear() == "running"
        refused = holdfast("run", "--name", "job", "--json", "--", "true", cwd=repo)
        assert (refused.returncode, error(refused, on="stderr")["code"]) == (4, "E_LOCK_CONFLICT")
        assert first.finish().returncode == 0
    assert holdfast("run", "--name", "job", "--", "true", cwd=repo).returncode == 0


def test_a_snapshot_needs_a_worktree(repo: Path) -> None:
    refused = holdfast("run", "--name", "job", "--snapshot", "--json", "--", "true", cwd=repo)
    assert (refused.returncode, error(refused, on="stderr")["code"]) == (2, "E_USAGE")
