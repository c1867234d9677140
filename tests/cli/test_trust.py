"""`holdfast trust`, and what commands do with a store or a checker that is not approved."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from tests.cli.commands import HOLDFAST, data, environment, error, holdfast
from tests.support.homes import git

ADDRESS = "etcd://db.example:2379/x"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    path = tmp_path / "repository"
    holdfast("init", path)
    holdfast("issue", "init", "--repo", path)
    return path


def plant(root: Path, address: str) -> None:
    (root / ".holdfast").mkdir(exist_ok=True)
    (root / ".holdfast/config.json").write_text(json.dumps({"schema_version": 1, "store": address}))


def change_checker(root: Path, **fields: object) -> None:
    path = root / ".jit/gates.json"
    registry = json.loads(path.read_text())
    registry["gates"]["tests"]["checker"] |= fields
    path.write_text(json.dumps(registry, indent=2))


def test_the_store_is_shown_approved_and_withdrawn(root: Path) -> None:
    elsewhere = root.parent / "elsewhere"
    elsewhere.mkdir()
    plant(root, f"file://{elsewhere}")
    refused = error(holdfast("issue", "list", "--repo", root, "--json"))
    assert refused["code"] == "E_NOT_APPROVED"
    assert f"'holdfast trust --repo {root}'" in refused["hint"]

    shown = data(holdfast("trust", "--repo", root, "--show", "--json"))
    assert (shown["store"], shown["store_approved"], shown["checkers"]) == (f"file://{elsewhere}", False, None)
    asked = error(holdfast("trust", "--repo", root, "--json"))
    assert (asked["code"], "--yes" in asked["hint"]) == ("E_USAGE", True)
    assert error(holdfast("status", "--repo", root, "--json"))["code"] == "E_NOT_APPROVED"

    assert data(holdfast("trust", "--repo", root, "--yes", "--json"))["store_approved"]
    assert error(holdfast("issue", "list", "--repo", root, "--json"))["code"] == "E_NOT_INITIALISED"  # it was asked
    assert data(holdfast("trust", "--repo", root, "--revoke", "--json"))["revoked"]
    assert error(holdfast("issue", "list", "--repo", root, "--json"))["code"] == "E_NOT_APPROVED"


def test_the_environment_approves_the_address_that_it_names(root: Path) -> None:
    elsewhere = root.parent / "elsewhere"
    elsewhere.mkdir()
    plant(root, f"file://{elsewhere}")
    given = {"HOLDFAST_STORE": f"file://{elsewhere}"}
    assert error(holdfast("status", "--repo", root, "--json", env=given))["code"] == "E_NOT_FOUND"  # it was asked
    other = {"HOLDFAST_STORE": f"file://{root.parent}/third"}
    assert error(holdfast("status", "--repo", root, "--json", env=other))["code"] == "E_NOT_APPROVED"


def test_a_checker_runs_if_it_was_defined_here_and_not_after_a_change(root: Path) -> None:
    holdfast("gate", "define", "tests", "--checker", "true", "--repo", root)
    issue = data(holdfast("issue", "create", "a", "--gate", "tests", "--repo", root, "--json"))["id"]
    assert holdfast("gate", "check", issue, "tests", "--repo", root).returncode == 0

    for change in ({"command": "touch planted"}, {"env": {"PATH": "."}}, {"working_dir": "main"}):
        before = (root / ".jit/gates.json").read_text()
        change_checker(root, **change)
        refused = error(holdfast("gate", "check", issue, "tests", "--repo", root, "--json"))
        assert refused["code"] == "E_NOT_APPROVED"
        assert not (root / "planted").exists()
        (root / ".jit/gates.json").write_text(before)

    change_checker(root, command="touch planted")
    (checker,) = data(holdfast("trust", "--repo", root, "--show", "--json"))["checkers"]
    assert (checker["gate"], checker["command"], checker["approved"]) == ("tests", "touch planted", False)
    assert holdfast("trust", "--repo", root, "--yes").returncode == 0
    assert holdfast("gate", "check", issue, "tests", "--repo", root).returncode == 0
    assert (root / "planted").exists()


def test_a_checker_in_a_linked_directory_is_not_started(root: Path) -> None:
    holdfast("gate", "define", "tests", "--checker", "touch planted", "--working-dir", "work", "--repo", root)
    issue = data(holdfast("issue", "create", "a", "--gate", "tests", "--repo", root, "--json"))["id"]
    (root / "work").symlink_to(root.parent)
    failed = error(holdfast("gate", "check", issue, "tests", "--repo", root, "--json"))
    assert failed["code"] == "E_GATE_FAILED"
    assert not (root.parent / "planted").exists()


def test_an_import_says_which_checkers_it_brings(root: Path) -> None:
    gates = {"brought": {"checker": {"type": "exec", "command": "touch planted"}}, "review": {"title": "review"}}
    text = json.dumps({"issues": [], "gates": gates})
    said = holdfast("issue", "import", "-", "--repo", root, stdin=text).stdout
    assert "the gate brought comes with the checker: touch planted" in said
    assert "holdfast trust" in said
    again = data(holdfast("issue", "import", "-", "--repo", root, "--json", stdin=text))
    assert again["checkers"] == {}


@pytest.mark.parametrize(("answer", "status"), [("y", 0), ("n", 130)])
def test_a_terminal_is_asked(root: Path, answer: str, status: int) -> None:
    if sys.platform == "win32":
        pytest.skip("needs a pseudo-terminal")
    import pty
    import subprocess

    holdfast("gate", "define", "tests", "--checker", "true", "--repo", root)
    change_checker(root, command="make it")
    ours, theirs = pty.openpty()
    command = [*HOLDFAST, "trust", "--repo", str(root)]
    child = subprocess.Popen(command, stdin=theirs, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment())
    os.close(theirs)
    os.write(ours, f"{answer}\n".encode())
    out, err = child.communicate(timeout=60)
    os.close(ours)

    assert b"Checker of tests: make it (not approved)" in out
    assert child.returncode == status, err
    (checker,) = data(holdfast("trust", "--repo", root, "--show", "--json"))["checkers"]
    assert checker["approved"] is (answer == "y")


# --- Child commands ---------------------------------------------------------------------------------


@pytest.mark.skipif(sys.platform == "win32", reason="needs env")
def test_a_command_does_not_inherit_the_password_of_the_store_unless_that_is_wanted(root: Path) -> None:
    secrets = {"HOLDFAST_STORE": "etcd://me:hunter2@127.0.0.1:9/x?password=hunter2", "PGPASSWORD": "hunter3"}
    said = holdfast("run", "--repo", root, "--", "env", env=secrets).stdout
    assert "HOLDFAST_STORE=etcd://me@127.0.0.1:9/x\n" in said
    assert "hunter2" not in said
    assert "PGPASSWORD=hunter3" in said  # no store on PostgreSQL: it is the command's own
    assert "hunter2" not in holdfast("lock", "run", root.parent / "x.lock", "--", "env", env=secrets).stdout

    passed = holdfast("run", "--repo", root, "--pass-store-secrets", "--", "env", env=secrets).stdout
    assert f"HOLDFAST_STORE={secrets['HOLDFAST_STORE']}\n" in passed
    broken = holdfast("run", "--repo", root, "--", "env", env={"HOLDFAST_STORE": "etcd:me:hunter2@h"}).stdout
    assert "HOLDFAST_STORE" not in broken


@pytest.mark.skipif(sys.platform == "win32", reason="needs env")
def test_a_command_and_a_checker_do_not_inherit_the_password_of_postgresql(tmp_path: Path, postgres_url: str) -> None:
    root, secret = tmp_path / "repository", {"PGPASSWORD": "hunter2"}
    assert holdfast("init", root, "--store", postgres_url, env=secret).returncode == 0
    assert "hunter2" not in holdfast("run", "--repo", root, "--", "env", env=secret).stdout
    passed = holdfast("run", "--repo", root, "--pass-store-secrets", "--", "env", env=secret).stdout
    assert "PGPASSWORD=hunter2" in passed

    holdfast("issue", "init", "--repo", root)
    holdfast("gate", "define", "tests", "--checker", "env", "--repo", root)
    issue = data(holdfast("issue", "create", "a", "--gate", "tests", "--repo", root, "--json"))["id"]
    (run,) = data(holdfast("gate", "check", issue, "--repo", root, "--json", env=secret))["runs"]
    assert "PATH=" in run["stdout"]
    assert "hunter2" not in run["stdout"]


def test_a_gate_is_not_defined_if_its_checker_cannot_be_approved(root: Path) -> None:
    (root.parent / "data").write_text("in place of the directory")
    define = ("gate", "define", "tests", "--checker", "make test", "--repo", root, "--json")
    result = holdfast(*define, env={"HOLDFAST_DATA_DIR": str(root.parent / "data")})
    assert error(result)["code"] == "E_IO", result
    assert data(holdfast("gate", "list", "--repo", root, "--json"))["gates"] == []
    assert holdfast(*define).returncode == 0


def test_a_gate_that_is_not_defined_leaves_no_approval(root: Path) -> None:
    assert holdfast("gate", "define", "tests", "--repo", root).returncode == 0
    refused = holdfast("gate", "define", "tests", "--checker", "make test", "--repo", root, "--json")
    assert error(refused)["code"] == "E_ALREADY_EXISTS"
    assert holdfast("gate", "define", "tests", "--replace", "--checker", "make other", "--repo", root).returncode == 0
    change_checker(root, command="make test")
    shown = data(holdfast("trust", "--repo", root, "--show", "--json"))
    assert [each["approved"] for each in shown["checkers"]] == [False]


def test_programs_of_the_git_configuration_are_shown_and_approved(tmp_path: Path) -> None:
    top = tmp_path / "project"
    git("init", "-q", "-b", "trunk", top)
    git("commit", "-q", "--allow-empty", "-m", "first", at=top)
    git("config", "credential.helper", "mine", at=top)
    asked = holdfast("init", cwd=top)
    assert (asked.returncode, asked.stdout) == (2, "git configuration: credential.helper = mine\n")
    assert "holdfast init --yes" in asked.stderr
    assert not (top / ".git/holdfast").exists()
    made = data(holdfast("init", "--yes", "--json", cwd=top))
    assert made["approved_programs"] == ["credential.helper = mine"]
    git("config", "filter.x.clean", "sort", at=top)
    assert error(holdfast("status", "--json", cwd=top))["code"] == "E_NOT_APPROVED"
    shown = data(holdfast("trust", "--repo", top, "--show", "--json"))["git_programs"]
    assert [(each["setting"], each["approved"]) for each in shown] == [
        ("credential.helper", True),
        ("filter.x.clean", False),
    ]
    assert "filter.x.clean = sort (not approved)" in holdfast("trust", "--show", cwd=top).stdout
    data(holdfast("trust", "--yes", "--json", cwd=top))
    data(holdfast("status", "--json", cwd=top))
