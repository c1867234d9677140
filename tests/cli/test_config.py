"""`holdfast config`, and worktrees that are ready to work: setup, files, ports and teardown."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.cli.commands import HOLDFAST, Result, data, environment, error, holdfast, wait_until

if sys.platform == "win32":
    pytest.skip("needs a POSIX shell", allow_module_level=True)

PORTS = ("sh", "-c", 'echo "$HOLDFAST_PORT | $HOLDFAST_PORTS"')


def repository(path: Path) -> Path:
    assert holdfast("init", path).returncode == 0
    assert holdfast("issue", "init", cwd=path).returncode == 0
    return path


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return repository(tmp_path / "project")


@pytest.fixture
def own_data(tmp_path: Path) -> Mapping[str, str]:
    """A data directory in which no other test leases ports."""
    return {"HOLDFAST_DATA_DIR": str(tmp_path / "data")}


def configure(root: Path, key: str, *values: str) -> None:
    result = holdfast("config", "set", key, *values, cwd=root)
    assert result.returncode == 0, result.stderr


def create(root: Path, name: str, *options: str, env: Mapping[str, str] | None = None) -> Result:
    return holdfast("worktree", "create", name, *options, "--json", cwd=root, env=env)


def add_issue(root: Path, title: str = "Work") -> str:
    return str(data(holdfast("issue", "create", title, "--json", cwd=root))["id"])


def test_settings_of_landing_are_checked(root: Path) -> None:
    configure(root, "land.checks", "make lint", "make test")
    configure(root, "land.check_timeout", "1h30m")
    configure(root, "land.batch", "4")
    configure(root, "land.parallel", "2")
    configure(root, "land.inputs", "**/deps.txt", "tool/*.lock")

    assert data(holdfast("config", "list", "--json", cwd=root))["settings"] == {
        "land.checks": ["make lint", "make test"],
        "land.check_timeout": ["1h30m"],
        "land.batch": ["4"],
        "land.parallel": ["2"],
        "land.inputs": ["**/deps.txt", "tool/*.lock"],
    }
    wrong = {"batch": ["0"], "parallel": ["65"], "check_timeout": ["25h"], "checks": [" "], "inputs": ["../x"]}
    for key, values in {**wrong, "batch ": ["1"]}.items():
        assert holdfast("config", "set", f"land.{key}", *values, cwd=root).returncode != 0, key
    for values in (["1", "2"], ["-1"], ["x"], ["9" * 30]):
        assert error(holdfast("config", "set", "--json", "land.batch", "--", *values, cwd=root)), values
    assert holdfast("config", "unset", "land.batch", cwd=root).stdout == "land.batch is unset\n"


def test_settings_are_set_shown_and_removed(root: Path) -> None:
    configure(root, "worktree.setup", "uv sync", "npm ci")
    configure(root, "worktree.ports", "10")

    assert holdfast("config", "get", "worktree.setup", cwd=root).stdout == "uv sync\nnpm ci\n"
    listed = data(holdfast("config", "list", "--json", cwd=root))["settings"]
    assert listed == {"worktree.setup": ["uv sync", "npm ci"], "worktree.ports": ["10", "20000"]}
    stored = json.loads((root / ".holdfast/settings.json").read_text())
    assert stored["worktree.ports"] == {"count": 10, "base": 20000}

    holdfast("config", "unset", "worktree.setup", cwd=root)
    assert holdfast("config", "list", cwd=root).stdout == "worktree.ports: 10 20000\n"


@pytest.mark.parametrize(
    ("key", "values"),
    [
        ("worktree.unknown", ["x"]),
        ("setup", ["x"]),
        ("worktree.setup", ["  "]),
        ("worktree.copy", ["../x"]),
        ("worktree.copy", ["/etc/passwd"]),
        ("worktree.ports", ["0"]),
        ("worktree.ports", ["ten"]),
        ("worktree.ports", ["10", "80"]),
        ("worktree.ports", ["10", "65530"]),
        ("worktree.ports", ["1", "20000", "3"]),
    ],
)
def test_a_value_that_makes_no_sense_is_refused(root: Path, key: str, values: list[str]) -> None:
    assert error(holdfast("config", "set", key, *values, "--json", cwd=root))["code"] in (
        *("E_USAGE", "E_SETTING_INVALID", "E_PATH_ESCAPE"),
    )
    assert data(holdfast("config", "list", "--json", cwd=root))["settings"] == {}


def test_an_unknown_key_in_the_file_is_refused(root: Path) -> None:
    (root / ".holdfast").mkdir(exist_ok=True)
    (root / ".holdfast/settings.json").write_text('{"worktree.setpu": ["x"]}')

    assert error(holdfast("config", "list", "--json", cwd=root))["code"] == "E_CORRUPT"


def test_settings_in_a_worktree_do_not_count(root: Path) -> None:
    (root / "main/.holdfast").mkdir()
    (root / "main/.holdfast/settings.json").write_text('{"worktree.setup": ["touch planted"]}')

    assert create(root, "w").returncode == 0
    assert not list(root.rglob("planted"))


def test_setup_runs_once_in_a_new_worktree_with_its_variables(root: Path) -> None:
    configure(root, "worktree.setup", "echo $HOLDFAST_WORKTREE $HOLDFAST_REPO $HOLDFAST_PORT >> ready", "pwd >> ready")
    configure(root, "worktree.ports", "3", "31000")

    assert create(root, "w").returncode == 0

    name, path, port, where = (root / "worktrees/w/ready").read_text().split()
    assert (name, path, where) == ("w", str(root), str(root / "worktrees/w"))
    assert holdfast("run", "--worktree", "w", "--", *PORTS, cwd=root).stdout.startswith(f"{port} | {port} ")
    add_issue(root)
    assert holdfast("agent", "run", "--next", "--worktree", "w", "--", "true", cwd=root).returncode == 0
    assert len((root / "worktrees/w/ready").read_text().splitlines()) == 2


def test_setup_can_be_skipped(root: Path) -> None:
    configure(root, "worktree.setup", "touch ready")

    assert create(root, "w", "--no-setup").returncode == 0
    add_issue(root)
    holdfast("agent", "run", "--next", "--worktree", "w", "--", "true", cwd=root)

    assert not (root / "worktrees/w/ready").exists()


def test_a_setup_that_fails_leaves_the_worktree_and_says_so(root: Path) -> None:
    configure(root, "worktree.setup", "touch first", "echo no such package >&2; exit 3", "touch third")

    failed = create(root, "w")

    told = error(failed)
    assert (failed.returncode, told["code"], told["exit_code"]) == (1, "E_SETUP_FAILED", 3)
    assert (told["output"], told["path"]) == ("no such package\n", str(root / "worktrees/w"))
    assert sorted(each.name for each in (root / "worktrees/w").iterdir()) == ["first"]
    assert "  no such package" in holdfast("worktree", "create", "v", cwd=root).stderr
    assert data(holdfast("who", "--json", cwd=root))["holdings"] == []


def test_a_setup_that_fails_does_not_start_the_agent_and_is_repeated(root: Path) -> None:
    issue = add_issue(root)
    configure(root, "worktree.setup", "exit 1")
    run = ("agent", "run", "--next", "--json", "--", "touch", "worked")

    told = error(holdfast(*run, cwd=root), on="stderr")

    worktree = root / "worktrees" / f"issue-{issue[:8]}"
    assert (told["code"], told["path"]) == ("E_SETUP_FAILED", str(worktree))
    shown = data(holdfast("issue", "show", issue, "--json", cwd=root))
    assert (shown["state"], shown["claim"]) == ("ready", None)
    assert not (worktree / "worked").exists()
    assert "> the setup of issue-" in holdfast("prime", "--issue", issue, cwd=root).stdout

    configure(root, "worktree.setup", "touch ready")
    assert holdfast(*run, cwd=root).returncode == 0
    assert sorted(each.name for each in worktree.iterdir()) == ["ready", "worked"]


def test_a_setup_that_was_killed_is_repeated(root: Path) -> None:
    issue = add_issue(root)
    configure(root, "worktree.setup", "touch begun; [ -e ../../go ] || sleep 3; touch ready")
    command = ["agent", "run", "--issue", issue, "--ttl", "1s", "--", "ls"]
    worktree = root / "worktrees" / f"issue-{issue[:8]}"
    with subprocess.Popen([*HOLDFAST, *command], env=environment(), cwd=root, stderr=subprocess.DEVNULL) as killed:
        wait_until((worktree / "begun").exists)
        killed.kill()
    (root / "go").touch()
    (worktree / "begun").unlink()

    def runs() -> bool:
        return holdfast(*command, cwd=root).returncode == 0

    wait_until(runs)  # when the claim and the lease have expired
    assert (worktree / "begun").exists()


def test_commands_that_are_not_approved_never_run(root: Path) -> None:
    issue = add_issue(root)
    (root / ".holdfast").mkdir(exist_ok=True)
    planted = {"worktree.setup": ["touch planted"], "worktree.teardown": ["touch ../../planted"]}
    (root / ".holdfast/settings.json").write_text(json.dumps(planted))

    refused = error(create(root, "w"))
    assert (refused["code"], refused["command"]) == ("E_NOT_APPROVED", "touch planted")
    assert "holdfast trust" in refused["hint"]
    assert not (root / "worktrees/w").exists()
    run = holdfast("agent", "run", "--next", "--json", "--", "true", cwd=root)
    assert error(run, on="stderr")["code"] == "E_NOT_APPROVED"
    assert data(holdfast("issue", "show", issue, "--json", cwd=root))["state"] == "ready"
    configure(root, "worktree.ports", "3")  # approves no command that was there
    assert error(create(root, "w"))["code"] == "E_NOT_APPROVED"
    assert create(root, "w", "--no-setup").returncode == 0
    remove = ("worktree", "remove", "w", "--json")
    assert error(holdfast(*remove, cwd=root))["code"] == "E_NOT_APPROVED"

    shown = data(holdfast("trust", "--show", "--json", cwd=root))["commands"]
    assert [(each["setting"], each["approved"]) for each in shown] == [
        ("worktree.setup", False),
        ("worktree.teardown", False),
    ]
    assert not list(root.rglob("planted"))
    assert holdfast("trust", "--yes", cwd=root).returncode == 0
    assert create(root, "v").returncode == 0
    assert (root / "worktrees/v/planted").exists()
    assert holdfast(*remove, cwd=root).returncode == 0
    assert (root / "planted").exists()


def test_a_removal_with_force_skips_commands_that_are_not_approved(root: Path) -> None:
    (root / ".holdfast").mkdir(exist_ok=True)
    (root / ".holdfast/settings.json").write_text('{"worktree.teardown": ["touch ../../planted"]}')
    create(root, "w")

    assert holdfast("worktree", "remove", "w", "--force", cwd=root).returncode == 0
    assert not (root / "planted").exists()


def test_a_teardown_that_fails_prevents_the_removal(root: Path) -> None:
    configure(root, "worktree.teardown", "echo still running; exit 2")
    create(root, "w")

    told = error(holdfast("worktree", "remove", "w", "--json", cwd=root))
    assert (told["code"], told["output"]) == ("E_TEARDOWN_FAILED", "still running\n")
    assert (root / "worktrees/w").is_dir()
    add_issue(root)
    done = holdfast("agent", "run", "--next", "--remove-worktree", "--", "touch", "x", cwd=root)
    assert (done.returncode, "the worktree stays: the teardown of issue-" in done.stderr) == (0, True)

    assert holdfast("worktree", "remove", "w", "--force", cwd=root).returncode == 0
    assert not (root / "worktrees/w").exists()


def test_files_of_main_are_copied_and_nothing_is_replaced(root: Path, tmp_path: Path) -> None:
    main, outside = root / "main", tmp_path / "outside"
    (outside / "secret").mkdir(parents=True)
    (outside / "secret/key").write_text("secret")
    (main / "kept").write_text("of the snapshot")
    holdfast("snapshot", cwd=root)
    (main / "kept").write_text("newer")
    for name, text in {".env": "A=1", "a/b/.env": "B=2", "a/b/other": "-", "deps/x/y": "z"}.items():
        (main / name).parent.mkdir(parents=True, exist_ok=True)
        (main / name).write_text(text)
    (main / ".env").chmod(0o640)
    (main / "deps/x/link").symlink_to("y")
    (main / "leading-out").symlink_to(outside)
    (main / ".jvs").mkdir()
    (main / ".jvs/file").write_text("-")
    configure(
        root, "worktree.copy", "**/.env", "deps", "kept", "leading-out/secret/*", "leading-out/**", ".jvs/*", "no"
    )

    assert create(root, "w", "--from", "main:head").returncode == 0

    made = root / "worktrees/w"
    found = {str(each.relative_to(made)) for each in made.rglob("*") if not each.is_dir()}
    assert found == {"kept", ".env", "a/b/.env", "deps/x/y", "deps/x/link"}
    assert ((made / "kept").read_text(), (made / ".env").read_text()) == ("of the snapshot", "A=1")
    assert (made / ".env").stat().st_mode & 0o777 == 0o640
    assert os.readlink(made / "deps/x/link") == "y"


def ports_of(root: Path, worktree: str, env: Mapping[str, str]) -> set[int]:
    ended = holdfast("run", "--worktree", worktree, "--", *PORTS, env=env, cwd=root)
    assert ended.returncode == 0, ended.stderr
    return set(map(int, ended.stdout.partition("|")[2].split()))


def test_no_two_worktrees_of_any_repository_have_a_port_in_common(tmp_path: Path, own_data: Mapping[str, str]) -> None:
    roots = [repository(tmp_path / name) for name in ("one", "two")]
    for root, count in zip(roots, ("3", "5"), strict=True):
        configure(root, "worktree.ports", count, "30000")
    places = [(root, f"w{each}") for root in roots for each in range(4)]
    for root, name in places:
        create(root, name, env=own_data)

    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda place: ports_of(place[0], place[1], own_data), places))

    assert [len(each) for each in found] == [3] * 4 + [5] * 4
    assert len(set().union(*found)) == 32
    assert set().union(*found) == set(range(30000, 30032))
    assert [ports_of(root, name, own_data) for root, name in places[:2]] == found[:2]  # each keeps its own


def test_ports_follow_a_rename_and_are_free_after_a_removal(root: Path, own_data: Mapping[str, str]) -> None:
    configure(root, "worktree.ports", "2", "30000")
    for name in ("a", "b"):
        create(root, name, env=own_data)
    first, second = (ports_of(root, name, own_data) for name in ("a", "b"))

    holdfast("worktree", "rename", "a", "c", cwd=root, env=own_data)
    create(root, "a", env=own_data)
    assert ports_of(root, "a", own_data) not in (first, second)
    assert ports_of(root, "c", own_data) == first

    holdfast("worktree", "remove", "c", cwd=root, env=own_data)
    create(root, "d", env=own_data)
    assert ports_of(root, "d", own_data) == first


def test_the_ports_of_a_deleted_repository_are_free(root: Path, tmp_path: Path, own_data: Mapping[str, str]) -> None:
    other = repository(tmp_path / "other")
    for each in (root, other):
        configure(each, "worktree.ports", "2", "30000")
    first = ports_of(other, "main", own_data)
    assert ports_of(root, "main", own_data) == {30002, 30003}

    other.rename(tmp_path / "moved")
    create(root, "w", env=own_data)

    assert ports_of(root, "w", own_data) == first
    assert ports_of(tmp_path / "moved", "main", own_data) == {30004, 30005}


def test_when_no_ports_are_left_the_command_is_not_started(root: Path, own_data: Mapping[str, str]) -> None:
    configure(root, "worktree.ports", "500", "65000")
    ports_of(root, "main", own_data)
    create(root, "w", env=own_data)

    refused = holdfast("run", "--worktree", "w", "--json", "--", "touch", "started", cwd=root, env=own_data)

    assert error(refused, on="stderr")["code"] == "E_REFUSED"
    assert not (root / "worktrees/w/started").exists()
