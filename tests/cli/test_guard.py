"""`holdfast guard` and the hooks refuse writes into worktrees leased by others, and no other writes."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cli.commands import Result, Running, data, environment, error, holdfast, python, wait_until
from tests.support.homes import make_repository, records_of

pytestmark = [
    pytest.mark.both_homes,
    pytest.mark.skipif(sys.platform == "win32", reason="ancestor processes are read from /proc"),
]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    directory = tmp_path / "root"
    make_repository(directory)
    assert holdfast("worktree", "create", "theirs", cwd=directory).returncode == 0
    return directory


@pytest.fixture
def theirs(root: Path) -> Iterator[Running]:
    """Another process, which has leased the worktree `theirs`."""
    command = ("sh", "-c", "echo leased; exec sleep 99")
    with Running("run", "--repo", root, "--worktree", "theirs", "--purpose", "refactoring", "--", *command) as run:
        assert run.hear() == "leased"
        yield run


def test_a_path_in_a_worktree_leased_by_another_process_is_refused(root: Path, theirs: Running) -> None:
    result = holdfast("guard", root / "worktrees/theirs/src/new.py", "--json")

    assert result.returncode == 4
    refused = error(result)
    assert (refused["code"], refused["worktree"]) == ("E_LOCK_CONFLICT", "theirs")
    assert f":{theirs.pid}:" in refused["holder_id"]
    assert "refactoring" in refused["message"]
    plain = holdfast("guard", root / "worktrees/theirs")
    assert plain.returncode == 4
    assert "refactoring" in plain.stderr


def test_everything_else_may_be_written(root: Path, theirs: Running, tmp_path: Path) -> None:
    for path in (root / "main/a", root / "main", root / "worktrees/absent/x", tmp_path / "elsewhere"):
        assert holdfast("guard", path).returncode == 0, path


def test_a_link_into_the_worktree_is_followed(root: Path, theirs: Running) -> None:
    (root / "main/link").symlink_to(root / "worktrees/theirs")

    assert holdfast("guard", "main/link/a", cwd=root).returncode == 4


def test_a_caller_that_names_the_lock_id_may_write(root: Path) -> None:
    lock_id = holdfast(
        "lease", "acquire", "--worktree", "theirs", "--holder-pid", "1", "--field", "lock_id", cwd=root
    ).stdout.strip()

    assert holdfast("guard", root / "worktrees/theirs/a").returncode == 4
    assert holdfast("guard", root / "worktrees/theirs/a", env={"HOLDFAST_LOCK_ID": lock_id}).returncode == 0
    assert holdfast("guard", root / "worktrees/theirs/a", "--lock-id", lock_id).returncode == 0


def test_an_agent_may_write_into_a_worktree_that_it_leased_with_another_command(root: Path) -> None:
    """This process runs both commands, so it is the holder."""
    assert holdfast("lease", "acquire", "--worktree", "theirs", cwd=root).returncode == 0

    assert holdfast("guard", root / "worktrees/theirs/a").returncode == 0


def test_an_expired_lease_blocks_no_writes(root: Path) -> None:
    acquired = ("lease", "acquire", "--worktree", "theirs", "--holder-pid", "1", "--ttl", "100ms")
    assert holdfast(*acquired, cwd=root).returncode == 0

    wait_until(lambda: holdfast("guard", root / "worktrees/theirs/a").returncode == 0)


ALLOWED = {"", "cli", "cli.quick", "fs", "fs.calls", "repository", "repository.guard", "repository.locating"}
REPORTING = {"cli.output", "errors", "fs.names"}
LIVENESS = {"locks", "locks.identity"}
REFUSED = ALLOWED | REPORTING | LIVENESS | {"clock"}
HOOKED = ALLOWED | REPORTING
SLOW = {
    "asyncio",
    "dataclasses",
    "datetime",
    "hashlib",
    "logging",
    "pathlib",
    "psutil",
    "subprocess",
    "urllib",
}
SLOW |= {"click", "msgspec", "rich", "inspect", "tempfile", "socket", "uuid", "decimal"}


def without_git(found: tuple[int, set[str]]) -> tuple[int, set[str]]:
    """Without the one small module that is loaded where a `.git` is on the way up."""
    return found[0], found[1] - {"git", "git.checkout"}


def loaded_by(*arguments: str | Path, stdin: str = "") -> tuple[int, set[str]]:
    """The exit status of a command and the modules of Holdfast that it loaded, without the prefix `holdfast.`."""
    program = (
        "import sys; sys.argv = ['holdfast', *sys.argv[1:]]; before = set(sys.modules)\n"
        "from holdfast.__main__ import main\n"
        "status = main(); print(status, *(set(sys.modules) - before), file=sys.stderr)"
    )
    command = [*python(program), *map(str, arguments)]
    result = subprocess.run(command, input=stdin, capture_output=True, text=True, check=True, env=environment())
    status, *modules = result.stderr.splitlines()[-1].split()
    refused = status != "0"
    assert not SLOW.intersection(modules) - ({"datetime"} if refused else set())
    ours = {each.partition(".")[2] for each in modules if each.partition(".")[0] == "holdfast"}
    return int(status), ours - {"__main__"}


def test_the_guard_loads_only_a_few_modules(root: Path, theirs: Running) -> None:
    """The guard runs before every write of every agent, and loading modules is most of its cost."""
    free, leased = root / "main/a", root / "worktrees/theirs/a"

    assert without_git(loaded_by("guard", free)) == (0, ALLOWED)
    assert without_git(loaded_by("guard", leased)) == (4, REFUSED)


def test_the_guarding_hooks_load_only_a_few_more_modules(root: Path, theirs: Running) -> None:
    def payload(path: str) -> str:
        return json.dumps({"cwd": str(root), "tool_input": {"file_path": path}})

    before_write = ("hook", "before-write", "--from", "claude@1")

    assert without_git(loaded_by(*before_write, stdin=payload("main/a"))) == (0, HOOKED)
    assert without_git(loaded_by(*before_write, stdin=payload("worktrees/theirs/a"))) == (2, HOOKED | REFUSED)
    assert without_git(loaded_by("hook", "pre-commit")) == (0, HOOKED)  # here, which may be a git checkout
    in_main = json.dumps({"cwd": str(root / "main")})
    assert without_git(loaded_by("hook", "after-tool", stdin=in_main)) == (0, HOOKED | LIVENESS)


def test_the_refusal_shows_the_holder_its_host_purpose_liveness_and_times(root: Path, theirs: Running) -> None:
    refused = error(holdfast("guard", root / "worktrees/theirs", "--json"))
    plain = holdfast("guard", root / "worktrees/theirs").stderr

    assert refused["liveness"] == "alive"
    assert 0 < refused["time_left"] <= 31
    for fact in ("holder_id", "host", "purpose", "liveness"):
        assert refused[fact] in plain, fact
    assert refused["created_at"].endswith("Z")
    assert re.search(r"leased (just now|\S+ ago), expires in ", plain)


def test_a_guard_in_a_deleted_directory_says_so(root: Path) -> None:
    gone = root / "main/gone"
    gone.mkdir()
    program = f"cd {gone} && rmdir {gone} && exec {sys.executable} -m holdfast guard a"

    result = subprocess.run(["sh", "-c", program], capture_output=True, text=True, env=environment(), check=False)

    assert result.returncode == 3
    assert "the current directory is gone" in result.stderr
    assert "Traceback" not in result.stderr


def test_agents_in_one_process_are_told_apart_by_their_names(root: Path) -> None:
    """This process stands for a program that runs two agents, in threads or as tasks."""
    alice, bob = {"HOLDFAST_ACTOR": "agent:alice"}, {"HOLDFAST_ACTOR": "agent:bob"}
    assert holdfast("lease", "acquire", "--worktree", "theirs", "--ttl", "1h", cwd=root, env=alice).returncode == 0
    path = root / "worktrees/theirs/a"
    conflict = error(holdfast("lease", "acquire", "--worktree", "theirs", "--json", cwd=root, env=bob))
    assert (conflict["code"], conflict["actor"]) == ("E_LOCK_CONFLICT", "agent:alice")
    assert "leased by agent:alice, " in conflict["message"]
    assert "leased by agent:alice, " in holdfast("lease", "status", "--worktree", "theirs", cwd=root).stdout

    assert holdfast("guard", path, env=alice).returncode == 0
    assert holdfast("guard", path).returncode == 0, "a caller without a name is identified by its process"
    refused = holdfast("guard", path, "--json", env=bob)
    assert refused.returncode == 4
    assert error(refused)["actor"] == "agent:alice"
    said = json.dumps({"cwd": str(root), "tool_input": {"file_path": str(path)}})
    assert holdfast("hook", "before-write", stdin=said, env=bob).returncode == 2
    assert holdfast("hook", "before-write", stdin=said, env=alice).returncode == 0

    assert holdfast("hook", "session-end", cwd=root, stdin="{}", env=bob).returncode == 0
    assert data(holdfast("lease", "status", "--worktree", "theirs", "--json", cwd=root))["state"] == "leased"
    assert holdfast("hook", "session-end", cwd=root, stdin="{}", env=alice).returncode == 0
    assert data(holdfast("lease", "status", "--worktree", "theirs", "--json", cwd=root))["state"] == "free"


def test_an_invalid_actor_name_is_refused_by_lease_acquire(root: Path) -> None:
    result = holdfast("lease", "acquire", "--json", cwd=root, env={"HOLDFAST_ACTOR": "alice"})

    assert (result.returncode, error(result)["code"]) == (2, "E_SETTING_INVALID")


# --- Hooks -------------------------------------------------------------------------------------------


def hook(event: str, said: dict[str, Any], cwd: Path, program: str = "claude") -> Result:
    return holdfast("hook", event, "--from", f"{program}@1", cwd=cwd, stdin=json.dumps(said))


@pytest.mark.parametrize(
    "given",
    [
        {"file_path": "../worktrees/theirs/a.py"},
        {"notebook_path": "../worktrees/theirs/a.ipynb"},
        {"command": "*** Begin Patch\n*** Update File: ../worktrees/theirs/a.py\n@@\n*** End Patch"},
        {"input": "*** Begin Patch\n*** Add File: a\n*** Move to: ../worktrees/theirs/a\n*** End Patch"},
    ],
)
@pytest.mark.sampled(1)
def test_the_hook_refuses_a_write_and_says_why(root: Path, theirs: Running, given: dict[str, str]) -> None:
    said = {"cwd": str(root / "main"), "tool_input": given}

    result = hook("before-write", said, root)

    assert result.returncode == 2
    assert "refactoring" in result.stderr


def test_cursor_gets_the_answer_in_its_own_format(root: Path, theirs: Running) -> None:
    said = {"workspace_roots": [str(root)], "tool_input": {"file_path": "worktrees/theirs/a.py"}}

    result = hook("before-write", said, root, "cursor")

    assert json.loads(result.stdout)["permission"] == "deny"
    assert result.returncode == 2


@pytest.mark.parametrize("said", [{}, {"tool_input": {"file_path": "main/a"}}, {"tool_input": [1]}])
@pytest.mark.sampled(1)
def test_other_writes_are_allowed(root: Path, theirs: Running, said: dict[str, Any]) -> None:
    assert hook("before-write", said, root).returncode == 0


@pytest.mark.parametrize("text", ["not json", "[]", '{"tool_input":' * 50_000, '{"tool_input":{"file_path":"main/a"'])
@pytest.mark.sampled(1)
def test_a_request_that_cannot_be_understood_may_be_about_any_worktree(root: Path, theirs: Running, text: str) -> None:
    assert holdfast("hook", "before-write", cwd=root, stdin=text).returncode == 2
    assert holdfast("hook", "before-write", cwd=root / "worktrees/theirs", stdin=text).returncode == 2
    assert holdfast("hook", "before-write", cwd=root / "main", stdin=text).returncode == 0


def test_a_request_with_unknown_fields_or_very_many_paths_is_judged_too(root: Path, theirs: Running) -> None:
    leased = str(root / "worktrees/theirs/a")
    for given in ({"destination": leased}, {"to": [{"name": leased}]}, {"paths": ["a"] * 2000}):
        assert hook("before-write", {"tool_input": given}, root).returncode == 2, str(given)[:80]
    assert hook("before-write", {"tool_input": {"destination": "a"}}, root / "main").returncode == 0
    content = {"file_path": str(root / "main/a"), "content": leased}
    assert hook("before-write", {"tool_input": content}, root).returncode == 0, "content is no path"


def test_an_agent_in_a_deleted_directory_is_refused_by_its_absolute_paths(root: Path, theirs: Running) -> None:
    gone = root / "main/gone"
    gone.mkdir()
    said = json.dumps({"tool_input": {"file_path": str(root / "worktrees/theirs/a")}})
    program = f"cd {gone} && rmdir {gone} && exec {sys.executable} -m holdfast hook before-write"

    result = subprocess.run(["sh", "-c", program], input=said, capture_output=True, text=True, env=environment())

    assert result.returncode == 2, result.stderr


def test_a_write_is_refused_if_the_store_that_knows_the_leases_cannot_be_asked(root: Path) -> None:
    (records_of(root) / ".holdfast").mkdir(exist_ok=True)
    config = {"schema_version": 1, "store": "gopher://nobody/knows"}
    (records_of(root) / ".holdfast/config.json").write_text(json.dumps(config))

    refused = hook("before-write", {"tool_input": {"file_path": "main/a"}}, root)

    assert refused.returncode == 2
    assert refused.stderr.strip()
    assert hook("session-end", {}, root).returncode == 0


def test_hooks_do_nothing_outside_a_repository(tmp_path: Path) -> None:
    for event in ("session-start", "before-write", "after-tool", "session-end", "pre-commit"):
        result = holdfast("hook", event, cwd=tmp_path, stdin="not json")
        assert (result.returncode, result.stdout) == (0, ""), event


def test_a_session_starts_with_a_list_of_the_holders(root: Path, theirs: Running) -> None:
    result = hook("session-start", {"cwd": str(root / "main")}, root)

    assert "refactoring" in result.stdout
    assert "additional_context" in json.loads(hook("session-start", {}, root, "cursor").stdout)


def test_tool_use_renews_the_leases_of_the_agent_and_session_end_releases_them(root: Path) -> None:
    assert holdfast("lease", "acquire", "--ttl", "1h", cwd=root).returncode == 0
    before = data(holdfast("lease", "status", "--json", cwd=root))["lease"]

    assert hook("after-tool", {}, root).returncode == 0
    after = data(holdfast("lease", "status", "--json", cwd=root))["lease"]
    assert after["lock_id"] == before["lock_id"]
    assert after["expires_at"] > before["expires_at"]
    assert hook("session-end", {}, root).returncode == 0
    assert data(holdfast("lease", "status", "--json", cwd=root))["state"] == "free"


def test_the_end_of_a_session_under_run_does_not_release_its_lease(root: Path) -> None:
    program = f"echo written > file; echo '{{}}' | {sys.executable} -m holdfast hook session-end"

    result = holdfast("run", "--snapshot", "--json", "--", "sh", "-c", program, cwd=root)

    assert result.returncode == 0, result.stderr
    assert json.loads(result.stderr)["data"]["snapshot_id"] is not None


def test_the_leases_of_others_are_left_alone(root: Path, theirs: Running) -> None:
    hook("session-end", {}, root)

    status = data(holdfast("lease", "status", "--worktree", "theirs", "--json", cwd=root))
    assert status["state"] == "leased"


def test_an_agent_whose_lease_is_lost_is_told_to_stop(root: Path) -> None:
    assert holdfast("lease", "acquire", "--ttl", "100ms", cwd=root).returncode == 0

    wait_until(lambda: "expired" in holdfast("lease", "status", cwd=root).stdout)  # a hook before that would renew it
    told = hook("after-tool", {}, root)
    assert told.returncode == 2
    assert "Stop writing" in told.stderr


def test_git_does_not_commit_in_a_worktree_leased_by_another_process(root: Path, theirs: Running) -> None:
    assert holdfast("hook", "pre-commit", cwd=root / "worktrees/theirs").returncode == 2
    assert holdfast("hook", "pre-commit", cwd=root / "main").returncode == 0
