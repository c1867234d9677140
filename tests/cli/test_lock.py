"""`holdfast lease`, `holdfast init` and `holdfast info`, with a process for each command."""

from __future__ import annotations

import json
import platform
import shutil
import subprocess
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from os import getpid
from pathlib import Path

import pytest

from holdfast.locks.identity import Liveness
from holdfast.repository.repository import Repository
from proof.effort import rounds
from tests.cli.commands import HOLDFAST, Running, data, environment, error, holdfast
from tests.repository.stages import expire, json_at, make_repository
from tests.support.homes import in_git, records_of

pytestmark = pytest.mark.both_homes


@pytest.fixture
def repo(scratch: Path) -> Path:
    make_repository(scratch / "repo")
    return scratch / "repo"


@pytest.mark.req("LC-01", "LC-04", "LC-05")
def test_a_lease_is_a_readable_file_with_all_required_fields(repo: Path) -> None:
    asked = ("lease", "acquire", "--ttl", "10m", "--purpose", "tests", "--json")
    lease = data(holdfast(*asked, cwd=repo, as_child=True))
    stored = json_at(repo / ".jvs/locks/main.json")
    renamed = {"worktree": "worktree_id", "token": "fencing_token"}
    renamed |= {"expires_at": "lease_expires_at", "renewed_at": "last_renewed_at"}
    assert stored == {renamed.get(name, name): value for name, value in lease.items()}
    assert {*"lock_id worktree_id holder_id created_at last_renewed_at".split()} < {*stored}
    assert {"lease_expires_at", "fencing_token"} < {*stored}
    host, user, pid, start_time = stored["holder_id"].split(":")
    assert host == platform.node()
    assert user
    assert int(pid) == getpid(), "the holder must be the process that ran the command"
    assert start_time.isdigit()
    assert len(stored["lock_id"]) == 36


@pytest.mark.req("LC-08", "LC-29")
def test_a_conflict_shows_the_holder_its_host_purpose_liveness_and_times(repo: Path) -> None:
    lease = data(holdfast("lease", "acquire", "--ttl", "10m", "--purpose", "a long job", "--json", cwd=repo))
    refused = holdfast("lease", "acquire", "--json", cwd=repo)
    told = error(refused)
    assert refused.returncode == 4
    assert told["code"] == "E_LOCK_CONFLICT"
    assert told["holder_id"] == lease["holder_id"]
    assert told["host"] == platform.node()
    assert told["purpose"] == "a long job"
    assert told["created_at"] == lease["created_at"]
    assert 0 < told["time_left"] <= 600
    assert told["liveness"] == "alive"
    shown = holdfast("lease", "acquire", cwd=repo).stderr
    assert all(each in shown for each in (lease["holder_id"], "a long job", "leased ", "expires in", "alive"))


def test_a_lease_is_passed_between_commands_in_the_environment(repo: Path) -> None:
    found = holdfast("lease", "acquire", "--ttl", "10m", "--field", "lock_id", cwd=repo)
    lock_id = found.stdout.strip()
    env = {"HOLDFAST_LOCK_ID": lock_id}
    before = json_at(repo / ".jvs/locks/main.json")
    assert holdfast("lease", "renew", "--ttl", "20m", cwd=repo, env=env).returncode == 0
    after = json_at(repo / ".jvs/locks/main.json")
    assert after["lease_expires_at"] > before["lease_expires_at"]
    assert after["last_renewed_at"] > before["last_renewed_at"]
    assert holdfast("lease", "release", cwd=repo, env=env).returncode == 0
    assert not (repo / ".jvs/locks/main.json").exists()


@pytest.mark.skipif(sys.platform == "win32", reason="needs a shell")
def test_a_shell_can_evaluate_the_exports_of_acquire(repo: Path) -> None:
    command = " ".join(HOLDFAST)
    script = f"""
        eval "$({command} lease acquire --ttl 10m --export)" && {command} lease renew --json &&
        printf '%s %s\\n' "$HOLDFAST_TOKEN" "$HOLDFAST_WORKTREE" && {command} lease release
    """
    result = subprocess.run(
        ["sh", "-c", script], cwd=repo, env=environment(), capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines()[1:] == ["1 main", "main: released"]


@pytest.mark.req("LC-10", "LC-16", "LC-29")
@pytest.mark.parametrize("command", ["renew", "release"])
def test_only_the_holder_can_renew_and_release(repo: Path, command: str) -> None:
    holdfast("lease", "acquire", "--ttl", "10m", cwd=repo)
    before = json_at(repo / ".jvs/locks/main.json")
    other = "00000000-0000-4000-8000-000000000000"
    for arguments in (["--lock-id", other], []):
        refused = holdfast("lease", command, *arguments, "--json", cwd=repo)
        assert refused.returncode == 5
        assert error(refused)["code"] == "E_LOCK_NOT_HELD"
    assert json_at(repo / ".jvs/locks/main.json") == before


@pytest.mark.req("LC-09", "LC-11", "LC-13", "LC-14", "LC-15", "LC-29")
def test_an_expired_lease_cannot_be_renewed_and_is_taken_over_by_acquiring_or_stealing(repo: Path) -> None:
    repository = Repository(repo)
    token = 0
    for how in ("acquire", "steal"):
        lease = data(holdfast("lease", "acquire", "--ttl", "10m", "--json", cwd=repo))
        refused = holdfast("lease", "steal", "--json", cwd=repo)
        assert error(refused)["code"] == "E_LOCK_CONFLICT"
        expire(repository)
        late = holdfast("lease", "renew", "--lock-id", lease["lock_id"], "--json", cwd=repo)
        assert (late.returncode, error(late)["code"]) == (5, "E_LOCK_EXPIRED")
        shown = data(holdfast("lease", "status", "--json", cwd=repo))
        assert shown["state"] == "expired"
        taken = data(holdfast("lease", how, "--ttl", "10m", "--json", cwd=repo))
        assert taken["token"] == lease["token"] + 1 > token
        token = taken["token"]
        last = json.loads((repo / ".jvs/audit/audit.jsonl").read_text().splitlines()[-1])
        assert last["event"] == "lock_stolen"
        assert last["facts"]["old"]["lock_id"] == lease["lock_id"]
        assert last["facts"]["new"]["fencing_token"] == token
        assert {"expired_at", "old", "new"} <= {*last["facts"]}
        holdfast("lease", "release", "--lock-id", taken["lock_id"], cwd=repo)
    nothing = holdfast("lease", "steal", "--json", cwd=repo)
    assert error(nothing)["code"] == "E_LOCK_NOT_HELD"


def test_a_lease_outlives_the_process_that_acquired_it_and_is_not_reported_dead(repo: Path) -> None:
    program = f"import subprocess; subprocess.run({[*HOLDFAST, 'lease', 'acquire', '--ttl', '10m']!r})"
    subprocess.run([sys.executable, "-c", program], cwd=repo, env=environment(), check=True)
    told = data(holdfast("lease", "status", "--json", cwd=repo))
    assert told["state"] == "leased"
    assert told["liveness"] == Liveness.UNKNOWN.value
    assert error(holdfast("lease", "acquire", "--json", cwd=repo))["liveness"] == "unknown"
    assert "belongs to whoever has its id" in holdfast("lease", "status", cwd=repo).stdout


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
@pytest.mark.parametrize("where", ["/dev/full", "&-"])
def test_a_lease_whose_id_could_not_be_printed_is_released(repo: Path, where: str) -> None:
    command = f"{' '.join(HOLDFAST)} lease acquire --ttl 10m >{where}"
    result = subprocess.run(["sh", "-c", command], cwd=repo, env=environment(), check=False)
    assert result.returncode != 0
    assert Repository(repo).leases.state("main") is None


def test_the_holder_process_can_be_chosen(repo: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as agent:
        lease = data(holdfast("lease", "acquire", "--holder-pid", str(agent.pid), "--json", cwd=repo))
        assert lease["holder_id"].split(":")[2] == str(agent.pid)
        agent.kill()
    refused = holdfast("lease", "acquire", "--holder-pid", str(agent.pid), "--json", cwd=repo)
    assert error(refused)["code"] == "E_USAGE"


def test_a_waiter_is_shown_in_the_queue_and_gets_the_lease_when_it_is_released(repo: Path) -> None:
    lock_id = holdfast("lease", "acquire", "--ttl", "10m", "--field", "lock_id", cwd=repo).stdout.strip()
    with Running("lease", "acquire", "--repo", repo, "--wait", "1m", "--json") as waiter:
        while not data(holdfast("lease", "status", "--json", cwd=repo))["waiting"]:
            pass
        shown = data(holdfast("lease", "list", "--json", cwd=repo))["worktrees"][0]
        assert shown["waiting"][0]["holder_id"].split(":")[2] == str(waiter.pid)
        holdfast("lease", "release", "--lock-id", lock_id, cwd=repo)
        result = waiter.finish()
    assert json.loads(result.stdout)["data"]["token"] == 2


def test_a_waiter_that_times_out_is_told_the_holder(repo: Path) -> None:
    lease = data(holdfast("lease", "acquire", "--ttl", "10m", "--json", cwd=repo))
    refused = holdfast("lease", "acquire", "--wait", "100ms", "--json", cwd=repo)
    assert (refused.returncode, error(refused)["code"]) == (75, "E_LOCK_TIMEOUT")
    assert error(refused)["holders"][0]["holder_id"] == lease["holder_id"]


@pytest.mark.req("LC-02", "LC-07", "LC-08")
def test_of_eight_concurrent_acquires_one_wins_and_seven_conflict(repo: Path) -> None:
    for _ in range(rounds(3, least=1)):
        with ThreadPoolExecutor(8) as callers:
            acquire = partial(holdfast, "lease", "acquire", "--ttl", "10m", "--json", cwd=repo)
            running = [callers.submit(acquire) for _ in range(8)]
        answers = [json.loads(each.result().stdout) for each in running]
        counted = Counter("won" if each["ok"] else each["error"]["code"] for each in answers)
        assert counted == {"won": 1, "E_LOCK_CONFLICT": 7}
        winner = next(each["data"]["lock_id"] for each in answers if each["ok"])
        holdfast("lease", "release", "--lock-id", winner, cwd=repo)


# --- Finding the repository and the worktree ---------------------------------------------------------


def test_the_current_directory_determines_the_repository_and_the_worktree(repo: Path) -> None:
    Repository(repo).worktrees.create("dev")
    below = repo / "worktrees/dev/a/b"
    below.mkdir(parents=True)
    for where, worktree in ((repo, "main"), (repo / "main", "main"), (below, "dev")):
        assert data(holdfast("lease", "status", "--json", cwd=where))["worktree"] == worktree


def test_flags_override_the_environment_which_overrides_the_current_directory(repo: Path, scratch: Path) -> None:
    Repository(repo).worktrees.create("dev")
    Repository(repo).worktrees.create("other")
    env = {"HOLDFAST_REPO": str(repo), "HOLDFAST_WORKTREE": "dev"}
    for arguments, worktree in (([], "dev"), (["--worktree", "other"], "other")):
        result = holdfast("lease", "status", *arguments, "--json", cwd=scratch, env=env)
        assert data(result)["worktree"] == worktree
    missing = holdfast("lease", "status", "--repo", scratch, "--json", cwd=repo, env=env)
    assert (missing.returncode, error(missing)["code"]) == (3, "E_NOT_INITIALISED")


def test_the_current_worktree_is_recognised_through_a_link_to_the_repository(repo: Path, scratch: Path) -> None:
    Repository(repo).worktrees.create("dev")
    (scratch / "link").symlink_to(repo)
    result = holdfast("lease", "status", "--repo", scratch / "link", "--json", cwd=repo / "worktrees/dev")
    assert data(result)["worktree"] == "dev"


# --- init and info -----------------------------------------------------------------------------------


def test_init_creates_a_repository_and_says_where_to_work(scratch: Path) -> None:
    (scratch / "project").mkdir()
    (scratch / "project/file").write_text("content")
    made = holdfast("init", "repo", "--import", "project", cwd=scratch)
    assert made.returncode == 0, made.stderr
    assert f"Work in {scratch / 'repo/main'}." in made.stdout
    assert (scratch / "repo/main/file").read_text() == "content"
    again = data(holdfast("init", "repo", "--json", cwd=scratch))
    assert again["created"] is False
    refused = holdfast("init", "project", "--json", cwd=scratch)
    assert (refused.returncode, error(refused)["code"]) == (4, "E_ALREADY_EXISTS")


@pytest.mark.req("LC-03", "LC-22")
def test_info_shows_the_format_worktrees_leases_and_warnings(repo: Path) -> None:
    holdfast("worktree", "create", "open", "--shared", cwd=repo)
    (repo / "worktrees/open/file").write_text("content")
    holdfast("lease", "acquire", "--ttl", "10m", cwd=repo)
    saved = Repository(repo).snapshot("open")
    told = data(holdfast("info", "--json", cwd=repo))
    assert told["format"] == 1
    assert told["root"] == str(records_of(repo))
    assert told["engine"] in {"git", "juicefs-clone", "btrfs-subvolume", "reflink", "linked", "copy"}
    main, shared = told["worktrees"]
    assert main["lease"]["state"] == "leased"
    assert (shared["isolation"], shared["high_risk"]) == ("shared", True)
    assert shared["head_snapshot_id"] == saved.snapshot_id
    assert told["best_effort_snapshots"] == [
        {"snapshot_id": saved.snapshot_id, "worktree": "open", "warning": "best_effort"}
    ]
    assert any("best_effort" in each for each in told["warnings"])
    shown = holdfast("info", cwd=repo).stdout
    assert "high-risk" in shown
    assert "warning" in shown


@pytest.mark.skipif(shutil.which("sh") is None, reason="needs a shell")
def test_a_newer_format_is_refused(repo: Path) -> None:
    path = repo / ".jvs/format.json"
    path.write_text(path.read_text().replace('"version": 1', '"version": 99'))
    for command in (["info"], ["init"] if in_git() else ["init", "."]):
        refused = holdfast(*command, "--json", cwd=repo / "main" if in_git() else repo)
        assert (refused.returncode, error(refused)["code"]) == (7, "E_REFUSED")
        assert error(refused)["version"] == 99


def test_a_named_lease_needs_no_worktree(repo: Path) -> None:
    job = ("--name", "nightly-job")
    lease = data(holdfast("lease", "acquire", *job, "--ttl", "10m", "--purpose", "the report", "--json", cwd=repo))
    assert (lease["name"], lease["worktree"], lease["token"]) == ("nightly-job", None, 1)
    refused = holdfast("lease", "acquire", *job, "--json", cwd=repo)
    assert (refused.returncode, error(refused)["code"], error(refused)["name"]) == (4, "E_LOCK_CONFLICT", "nightly-job")
    assert holdfast("lease", "steal", *job, cwd=repo).returncode == 4
    own = {"HOLDFAST_LEASE_ID": lease["lock_id"]}
    again = holdfast("lease", "acquire", *job, "--json", cwd=repo, env=own)
    assert error(again)["code"] == "E_LOCK_REENTRY"
    assert data(holdfast("lease", "renew", *job, "--json", cwd=repo, env=own))["token"] == 1
    assert data(holdfast("lease", "status", *job, "--json", cwd=repo))["state"] == "leased"
    listed = data(holdfast("lease", "list", "--json", cwd=repo))
    assert [each["state"] for each in listed["worktrees"]] == ["free"]
    assert [each["name"] for each in listed["named"]] == ["nightly-job"]
    assert "lease nightly-job" in holdfast("who", cwd=repo).stdout
    assert holdfast("lease", "release", *job, cwd=repo, env=own).returncode == 0
    assert holdfast("lease", "status", *job, cwd=repo).stdout == "nightly-job: free\n"
    exported = holdfast("lease", "acquire", *job, "--export", cwd=repo).stdout
    assert "export HOLDFAST_LEASE_NAME=nightly-job" in exported
    assert "export HOLDFAST_LEASE_TOKEN=2" in exported


def test_a_name_and_a_worktree_exclude_each_other(repo: Path) -> None:
    both = holdfast("lease", "acquire", "--name", "a", "--worktree", "main", "--json", cwd=repo)
    assert (both.returncode, error(both)["code"]) == (2, "E_USAGE")
    empty = holdfast("lease", "acquire", "--name", "", "--json", cwd=repo)
    assert error(empty)["code"] == "E_NAME_INVALID"
