"""Snapshots from the command line, with real processes and real kills."""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from holdfast.cli import entry
from holdfast.repository.context import MAIN
from holdfast.repository.repository import Repository
from tests.cli.commands import (
    HOLDFAST,
    Result,
    Running,
    data,
    died_of,
    environment,
    error,
    holdfast,
    wait_until,
)
from tests.repository.history_states import state_of
from tests.repository.stages import expire, make_repository

pytestmark = [
    pytest.mark.both_homes,
    pytest.mark.skipif(sys.platform == "win32", reason="Windows cannot exchange directories"),
]


def is_capturing(scratch: Path) -> bool:
    """Whether a process has begun to capture in a scratch directory, in either home."""
    return any((scratch / name).is_dir() for name in ("tree", "objects"))


@pytest.fixture
def root(scratch: Path) -> Path:
    make_repository(scratch / "repository")
    (scratch / "repository" / "main" / "file").write_text("one\n")
    return scratch / "repository"


def call(root: Path, *arguments: str, env: dict[str, str] | None = None, worktree: str = MAIN) -> Result:
    """Run a command in a worktree, inside this process: from its arguments to its output it is the same."""
    where = root / "main" if worktree == MAIN else root / "worktrees" / worktree
    out, err = io.StringIO(), io.StringIO()
    with (
        contextlib.chdir(where),
        mock.patch.dict(os.environ, environment(env), clear=True),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        status = entry.run(arguments)
    return Result(arguments, status, out.getvalue(), err.getvalue())


def run(root: Path, *arguments: str, env: dict[str, str] | None = None, worktree: str = MAIN) -> Any:
    """The data or the error that a command in a worktree prints with `--json`."""
    result = call(root, *arguments, "--json", env=env, worktree=worktree)
    return data(result) if result.returncode == 0 else error(result)


def acquire(root: Path, *options: str) -> dict[str, str]:
    """Acquire the lease and return the environment variables that name it."""
    made = run(root, "lease", "acquire", "--ttl", "1h", *options)
    return {
        "HOLDFAST_LOCK_ID": made["lock_id"],
        "HOLDFAST_TOKEN": str(made["token"]),
        "HOLDFAST_WORKTREE": made["worktree"],
    }


@pytest.mark.req("LC-20", "LC-22")
def test_snapshots_are_listed_and_best_effort_ones_carry_a_warning(root: Path) -> None:
    first = run(root, "snapshot", "-m", "first", "--tag", "v1")
    assert first["note"] == "first"
    assert first["warning"] is False
    second = run(root, "snapshot", "--allow-empty", "--consistency", "best_effort")
    found = run(root, "history")
    assert [each["snapshot_id"] for each in found["snapshots"]] == [
        second["snapshot_id"],
        first["snapshot_id"],
    ]
    assert [each["warning"] for each in found["snapshots"]] == [True, False]
    assert [each["consistency_level"] for each in found["snapshots"]] == ["best_effort", "quiesced"]
    assert found["snapshots"][1]["references"] == ["v1"]
    text = call(root, "history").stdout
    assert text.count("warning: best effort") == 1
    assert run(root, "show", "v1")["snapshot_id"] == first["snapshot_id"]
    assert "warning" in call(root, "show", "head").stdout
    entries = run(root, "show", "v1", "--files")["entries"]
    assert [each["path"] for each in entries if each["path"]] == ["file"]
    assert run(root, "history", "--limit", "1")["more"] is True
    assert run(root, "status")["clean"] is True


@pytest.mark.req("LC-24")
def test_history_changes_nothing_and_needs_no_lease(root: Path) -> None:
    run(root, "snapshot")
    acquire(root)
    before = state_of(root)
    for options in ((), ("--all",), ("--graph",)):
        assert len(run(root, "history", *options).get("snapshots", ())) == 1
    assert state_of(root) == before


@pytest.mark.req("LC-23")
def test_a_snapshot_leases_a_free_worktree_and_needs_the_lease_of_a_leased_one(root: Path) -> None:
    run(root, "snapshot")
    assert run(root, "lease", "status")["state"] == "free"
    env = acquire(root)
    refused = run(root, "snapshot")
    assert refused["code"] == "E_LOCK_CONFLICT"
    assert "--lock-id" in refused["hint"]
    assert run(root, "snapshot", "--allow-empty", env=env)["token"] == int(env["HOLDFAST_TOKEN"])
    lock_id = env["HOLDFAST_LOCK_ID"]
    assert run(root, "snapshot", "--allow-empty", "--lock-id", lock_id)["lock_id"] == lock_id
    assert len(run(root, "history")["snapshots"]) == 3


@pytest.mark.req("LC-18", "LC-29")
def test_a_stale_lease_publishes_nothing_and_the_exit_status_is_that_of_fencing(root: Path) -> None:
    env = acquire(root)
    repository = Repository(root)
    expire(repository)
    thief = run(root, "lease", "steal", "--ttl", "1h")
    for stale in (env, {**env, "HOLDFAST_TOKEN": ""}, {**env, "HOLDFAST_TOKEN": str(thief["token"])}):
        result = call(root, "snapshot", "--json", env=stale)
        assert result.returncode == 5
        assert error(result)["code"] == "E_FENCING_MISMATCH"
    inplace = ("restore", "v1", "--inplace", "--reason", "stale")
    good = {"HOLDFAST_LOCK_ID": thief["lock_id"]}
    made = run(root, "snapshot", "--tag", "v1", env=good)
    (root / "main" / "file").write_text("unsaved")
    assert run(root, *inplace, env=env)["code"] == "E_FENCING_MISMATCH"
    assert (root / "main" / "file").read_text() == "unsaved"
    assert [each["snapshot_id"] for each in run(root, "history")["snapshots"]] == [made["snapshot_id"]]
    process = holdfast(*inplace, "--json", cwd=root / "main", env=env)
    assert process.returncode == 5
    assert run(root, *inplace, env=good)["kept_snapshot_id"]
    assert (root / "main" / "file").read_text() == "one\n"


def test_a_waiter_gets_the_lease_when_it_is_free(root: Path) -> None:
    env = acquire(root)
    assert run(root, "snapshot", "--wait", "10ms")["code"] == "E_LOCK_TIMEOUT"
    with Running("snapshot", "--repo", root, "--wait", "30s", "--json") as waiting:
        wait_until(lambda: run(root, "lease", "status")["waiting"])
        run(root, "lease", "release", env=env)
        assert data(waiting.finish())["token"] > int(env["HOLDFAST_TOKEN"])


def test_the_lease_in_the_environment_applies_only_to_its_own_worktree(root: Path) -> None:
    env = acquire(root)
    run(root, "worktree", "create", "dev")
    made = run(root, "snapshot", "--worktree", "dev", env=env)
    assert made["lock_id"] != env["HOLDFAST_LOCK_ID"]
    assert run(root, "snapshot", env={**env, "HOLDFAST_TOKEN": "x"})["code"] == "E_SETTING_INVALID"


@pytest.mark.req("LC-03", "LC-23", "LC-26", "WT-05")
def test_a_shared_worktree_is_best_effort_and_restored_in_place_only_if_allowed(root: Path) -> None:
    run(root, "snapshot", "--tag", "v1")
    run(root, "worktree", "create", "open", "--shared")
    made = run(root, "snapshot", worktree="open")
    assert made["consistency_level"] == "best_effort"
    assert made["warning"] is True
    inplace = ("restore", "v1", "--inplace", "--reason", "tested")
    assert run(root, *inplace, worktree="open")["code"] == "E_REFUSED"
    assert run(root, *inplace, "--allow-shared", worktree="open")["head_snapshot_id"]
    assert (root / "worktrees" / "open" / "file").read_text() == "one\n"


@pytest.mark.req("WT-09", "LC-25", "LC-26")
def test_a_worktree_is_created_snapshotted_restored_and_removed(root: Path) -> None:
    first = run(root, "snapshot")["snapshot_id"]
    run(root, "worktree", "create", "life", "--from", "head")
    work = root / "worktrees" / "life"
    (work / "file").write_text("two\n")
    second = run(root, "snapshot", worktree="life")["snapshot_id"]
    plan = run(root, "restore", first, "--inplace", "--reason", "undo", "--dry-run", worktree="life")
    assert plan["counts"] == {"added": 0, "removed": 0, "modified": 1}
    assert plan["keeps"] is False
    assert (work / "file").read_text() == "two\n"
    restored = run(root, "restore", first, "--inplace", "--reason", "undo", worktree="life")
    assert (work / "file").read_text() == "one\n"
    beside = run(root, "restore", second, "beside")
    assert (Path(beside["path"]) / "file").read_text() == "two\n"
    (work / "late").write_text("unsaved")
    removed = run(root, "worktree", "remove", "life")
    assert not work.exists()
    everything = {each["snapshot_id"] for each in run(root, "history", "--all")["snapshots"]}
    assert everything == {first, second, restored["head_snapshot_id"], removed["saved_snapshot_id"]}
    assert run(root, "verify", "--all")["problems"] == []


def test_differences_are_shown_as_names_statistics_and_patches(root: Path) -> None:
    run(root, "snapshot", "--tag", "v1")
    (root / "main" / "file").write_text("two\n")
    (root / "main" / "new").write_text("more\n")
    assert run(root, "status")["counts"] == {"added": 1, "removed": 0, "modified": 1}
    assert call(root, "diff").stdout == "M file\nA new\n1 added, 0 removed, 1 modified\n"
    assert "-one\n+two\n" in call(root, "diff", "--patch").stdout
    assert "file | +1 -1\n" in call(root, "diff", "--stat").stdout
    assert run(root, "diff", "--stat")["lines"][0] == {
        "path": "file",
        "binary": False,
        "added": 1,
        "removed": 1,
    }
    assert run(root, "diff", "v1", "head")["changes"] == []
    assert run(root, "diff", "--patch", "--stat")["code"] == "E_USAGE"


@pytest.mark.plain_home("git lists no directories")
def test_the_entries_of_a_large_new_directory_are_counted_and_listed_only_on_request(root: Path) -> None:
    run(root, "snapshot")
    for name in ("packages/a", "packages/b", "small"):
        (root / "main" / name).mkdir(parents=True)
        for number in range(15 if name != "small" else 2):
            (root / "main" / name / f"{number}.js").write_text("x")
    (root / "main" / "zero").write_text("x")

    shown = call(root, "status").stdout.splitlines()[1:]
    assert sorted(shown) == [
        "37 added, 0 removed, 0 modified",
        "A packages  (directory with 32 entries)",
        "A small  (directory)",
        "A small/0.js",
        "A small/1.js",
        "A zero",
    ]
    assert call(root, "diff").stdout.splitlines() == shown
    assert len(call(root, "status", "--all").stdout.splitlines()) == 1 + 37 + 1
    assert len(run(root, "diff")["changes"]) == 37
    run(root, "snapshot")
    shutil.rmtree(root / "main" / "packages")
    assert "D packages  (directory with 32 entries)\n" in call(root, "diff").stdout


@pytest.mark.plain_home("it damages the tree of a snapshot")
def test_a_damaged_snapshot_is_found(root: Path) -> None:
    run(root, "snapshot", "--tag", "v1")
    damaged = run(root, "show", "v1")
    (root / "main" / "file").write_text("other\n")
    sound = run(root, "snapshot")["snapshot_id"]
    stored = root / ".jvs" / "snapshots" / damaged["snapshot_id"] / "payload" / "file"
    os.chmod(stored, 0o644)
    os.unlink(stored)
    stored.write_text("two\n")
    assert run(root, "verify")["verified"] == [sound]
    result = call(root, "verify", "--all", "--json")
    assert result.returncode == 6
    found = error(result)
    assert found["code"] == "E_CORRUPT"
    assert found["snapshots"] == [damaged["snapshot_id"]]
    assert found["problems"][0]["path"]


@pytest.mark.plain_home("it damages the tree of a snapshot")
@pytest.mark.req("LC-27")
def test_no_command_shows_or_restores_a_partial_snapshot(root: Path) -> None:
    partial = run(root, "snapshot")["snapshot_id"]
    (root / ".jvs" / "snapshots" / partial / ".READY").unlink()
    assert run(root, "history")["snapshots"] == []
    assert run(root, "history", "--all")["snapshots"] == []
    for command in ("show", "restore", "verify"):
        assert run(root, command, partial[:8])["code"] == "E_PARTIAL_SNAPSHOT"
    assert run(root, "diff", partial)["code"] == "E_PARTIAL_SNAPSHOT"
    assert run(root, "verify", "--all")["code"] == "E_CORRUPT"


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (("restore", "head", "--inplace"), "E_USAGE"),
        (("restore", "head", "name", "--inplace", "--reason", "x"), "E_USAGE"),
        (("restore", "head", "--path", "file"), "E_USAGE"),
        (("restore", "head", "--inplace", "--reason", "x", "--path", "../file"), "E_PATH_ESCAPE"),
        (("restore", "nowhere"), "E_NOT_FOUND"),
        (("restore", "head", "../escape"), "E_NAME_INVALID"),
        (("show", "head~9"), "E_NOT_FOUND"),
        (("show", "a b"), "E_NAME_INVALID"),
        (("snapshot", "--tag", "head"), "E_USAGE"),
        (("snapshot", "--engine", "reflink", "--worktree", "nowhere"), "E_NOT_FOUND"),
        (("verify", "head", "--all"), "E_USAGE"),
    ],
)
def test_an_invalid_request_is_refused_with_a_code(root: Path, arguments: tuple[str, ...], code: str) -> None:
    run(root, "snapshot")
    assert run(root, *arguments)["code"] == code


@pytest.mark.plain_home("a git home has one engine")
def test_the_engine_comes_from_the_option_or_the_environment(root: Path) -> None:
    assert run(root, "snapshot", "--engine", "copy")["engine"] == "copy"
    assert run(root, "snapshot", env={"JVS_SNAPSHOT_ENGINE": "copy"})["engine"] == "copy"
    assert run(root, "snapshot", "--engine", "linked", env={"JVS_SNAPSHOT_ENGINE": "copy"})["engine"] == "linked"
    assert run(root, "snapshot", env={"JVS_SNAPSHOT_ENGINE": "magic"})["code"] == "E_SETTING_INVALID"


@pytest.mark.plain_home("git does not replace the directory")
def test_a_shell_in_a_directory_that_was_restored_in_place_is_told_so(root: Path) -> None:
    run(root, "snapshot", "--tag", "v1")
    (root / "main" / "file").write_text("two\n")
    script = (
        f"cd {root}/main && {' '.join(HOLDFAST)} restore v1 --inplace --reason x >../out.txt;"
        f'{" ".join(HOLDFAST)} status; cd "$PWD" && {" ".join(HOLDFAST)} status'
    )
    done = subprocess.run(["sh", "-c", script], capture_output=True, text=True, env=environment())
    assert "the current directory is gone" in done.stderr
    assert 'cd "$PWD"' in done.stderr
    assert "Nothing has changed." in done.stdout


def test_without_a_terminal_a_snapshot_shows_no_progress(root: Path) -> None:
    """On one, it does: see `test_progress`."""
    (root / "main" / "file").write_text("x")
    quiet = holdfast("snapshot", cwd=root / "main")
    assert quiet.stderr == ""
    assert len(quiet.stdout.splitlines()) == 1


def test_a_killed_snapshot_leaves_nothing_in_the_history_and_can_be_repeated(root: Path) -> None:
    for number in range(3000):
        (root / "main" / f"file-{number}").write_text("x" * 100)
    env = acquire(root)
    with Running("snapshot", "--repo", root, env=env) as command:
        temporary = root / ".jvs" / "tmp"
        wait_until(lambda: temporary.is_dir() and any(map(is_capturing, temporary.iterdir())))
        command.kill()
        command.finish()
    assert run(root, "history", "--all")["snapshots"] == []
    made = run(root, "snapshot", env=env)
    assert [each["snapshot_id"] for each in run(root, "history")["snapshots"]] == [made["snapshot_id"]]


_LATE = """
import os, signal, time
from holdfast.cli.entry import Terminated, termination_raises

class Late:
    def __del__(self):
        os.kill(os.getpid(), signal.SIGTERM)

try:
    with termination_raises():
        late = Late()
        del late
        time.sleep(60)
except Terminated as asked:
    print(asked.number)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no such signal")
def test_a_signal_that_arrives_in_a_finalizer_is_not_lost() -> None:
    """Python ignores what is raised there, and the command would go on."""
    result = subprocess.run([sys.executable, "-c", _LATE], capture_output=True, text=True, check=True)
    assert (result.stdout, result.stderr) == ("15\n", "")


def test_a_terminated_command_releases_its_lease(root: Path) -> None:
    """After `kill`, or a stop by a service manager or a build server, nobody has to wait for a lease to expire."""
    os.truncate(root / "main" / "file", 1 << 31)  # makes the snapshot slow
    with Running("snapshot", "--repo", root) as command:
        temporary = root / ".jvs" / "tmp"
        wait_until(lambda: temporary.is_dir() and any(map(is_capturing, temporary.iterdir())))
        command.send(signal.SIGTERM)
        result = command.finish()
    assert died_of(result) is signal.SIGTERM
    assert Repository(root).leases.state(MAIN) is None
    assert list(temporary.iterdir()) == []
    assert run(root, "history", "--all")["snapshots"] == []


def test_a_terminated_command_restores_the_terminal(root: Path) -> None:
    if sys.platform == "win32":
        raise NotImplementedError("Windows has no pseudo-terminals")
    import pty

    ours, theirs = pty.openpty()
    command = [*HOLDFAST, "top", "--repo", str(root)]
    with subprocess.Popen(
        command, env=environment({"TERM": "xterm"}), stdin=theirs, stdout=theirs, stderr=theirs
    ) as process:
        os.close(theirs)
        seen = b""
        with contextlib.suppress(OSError):
            while piece := os.read(ours, 4096):
                seen += piece
                if b"Nobody holds anything" in seen and process.poll() is None:
                    process.send_signal(signal.SIGTERM)
        assert process.wait() == -signal.SIGTERM
    os.close(ours)
    assert seen.count(b"\x1b[?1049h") == seen.count(b"\x1b[?1049l") == 1
    assert seen.rindex(b"\x1b[?25h") > seen.rindex(b"\x1b[?25l")


@pytest.mark.req("LC-18")
def test_a_holder_that_was_stolen_from_learns_that_even_if_the_worktree_is_gone(root: Path) -> None:
    repository = Repository(root)
    repository.worktrees.create("dev")
    (repository.path("dev") / "file").write_text("one")
    held = repository.lease("dev", ttl=600)
    repository.snapshot("dev", held, tag="good")
    own = {"HOLDFAST_WORKTREE": "dev", "HOLDFAST_LOCK_ID": held.lock_id, "HOLDFAST_TOKEN": str(held.token)}
    expire(repository, "dev")
    repository.leases.release("dev", repository.steal("dev").lease.lock_id)
    repository.remove_worktree("dev")
    restore = ("--inplace", "--reason", "x")
    for command in (("snapshot",), ("restore", "good", *restore), ("restore", "head", *restore)):
        refused = holdfast(*command, "--json", cwd=root, env=own)
        assert (refused.returncode, error(refused)["code"]) == (5, "E_FENCING_MISMATCH")


def _damage(root: Path, snapshot_id: str, name: str) -> None:
    """Change a stored file, without a trace in its status."""
    stored = root / ".jvs/snapshots" / snapshot_id / "payload" / name
    status = stored.stat()
    stored.chmod(0o644)
    stored.write_text("x" * status.st_size)
    stored.chmod(status.st_mode)
    os.utime(stored, ns=(status.st_atime_ns, status.st_mtime_ns))


@pytest.mark.plain_home("it damages the tree of a snapshot")
def test_a_damaged_snapshot_is_repaired_from_a_worktree_and_says_what_is_not(root: Path) -> None:
    (root / "main" / "lost").write_text("nobody has it\n")
    first = run(root, "snapshot")["snapshot_id"]
    (root / "main" / "lost").unlink()
    for name in ("file", "lost"):
        _damage(root, first, name)
    left = run(root, "verify", "--all", "--repair")
    assert left["code"] == "E_CORRUPT"
    assert [each["path"] for each in left["problems"]] == ["lost"]
    assert [Path(each["path"]).name for each in left["repaired"]] == ["file"]
    assert run(root, "restore", first, "--inplace", "--reason", "x")["code"] == "E_CORRUPT"
    assert not (root / "main" / "lost").exists()
    (root / "main" / "found").write_text("nobody has it\n")
    done = call(root, "verify", first, "--repair")
    assert done.stdout.splitlines()[-1] == f"{first}: verified"
    assert done.stdout.startswith("Repaired ")
    assert run(root, "verify", "--all", "--repair")["repaired"] == []
    assert run(root, "restore", first, "--inplace", "--reason", "x")["snapshot_id"] == first
    assert (root / "main" / "lost").read_text() == "nobody has it\n"
    assert any(each["event"] == "snapshots_repaired" for each in run(root, "audit")["entries"])


@pytest.mark.plain_home("it damages the tree of a snapshot")
def test_a_file_too_many_in_a_snapshot_is_for_people_to_remove(root: Path) -> None:
    first = run(root, "snapshot")["snapshot_id"]
    (root / ".jvs/snapshots" / first / "payload/file~").write_text("left by an editor\n")
    for arguments in ((), ("--repair",)):
        told = call(root, "verify", first, *arguments).stderr
        assert "file~: it is not in the manifest" in told
        assert "Remove the extra entries" in told
        assert "backup" not in told


@pytest.mark.plain_home("it damages the tree of a snapshot")
def test_a_snapshot_on_top_of_a_damaged_one_is_sound_and_warns(root: Path) -> None:
    first = run(root, "snapshot")["snapshot_id"]
    _damage(root, first, "file")
    (root / "main" / "other").write_text("changed\n")
    taken = call(root, "snapshot")
    assert taken.stderr == f"Warning: {first} is damaged, in .: run 'holdfast verify {first} --repair'\n"
    assert run(root, "verify")["problems"] == []
    assert run(root, "verify", first, "--repair")["verified"] == [first]


@pytest.mark.plain_home("it damages the tree of a snapshot")
def test_with_json_a_warning_is_in_the_envelope_and_nowhere_else(root: Path) -> None:
    first = run(root, "snapshot")["snapshot_id"]
    _damage(root, first, "file")
    taken = call(root, "run", "--snapshot", "--json", "--", "touch", "other")
    assert json.loads(taken.stderr)["warnings"] == [f"{first} is damaged, in .: run 'holdfast verify {first} --repair'"]
