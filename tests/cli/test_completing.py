"""Shell completion offers existing names: through the protocols of bash, zsh and fish, and in a real bash."""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import click
import pytest

from holdfast.cli.candidates import source_of
from holdfast.cli.entry import root as holdfast_command
from tests.cli.commands import PATIENCE, environment, holdfast

if sys.platform == "win32":
    pytest.skip("completion is for bash, zsh and fish", allow_module_level=True)


class Place(NamedTuple):
    """A repository with one object of each kind."""

    root: Path
    snapshot: str
    issue: str
    lock_id: str


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    root = tmp_path_factory.mktemp("completing") / "root"

    def output(*command: str) -> str:
        result = holdfast(*command, cwd=root)
        assert result.returncode == 0, result.stderr
        return result.stdout.strip()

    holdfast("init", root)
    (root / "main/file").touch()
    output("issue", "init")
    output("gate", "define", "review", "--title", "Somebody else has read it")
    snapshot = output("snapshot", "-m", "the beginning\x1b[31m", "--field", "snapshot_id")
    output("ref", "create", "release-1", snapshot)
    output("worktree", "create", "experiment")
    issue = output("issue", "create", "Write the parser", "--field", "id")
    lock_id = output("lease", "acquire", "--ttl", "1h", "--worktree", "experiment", "--field", "lock_id")
    output("lease", "acquire", "--name", "nightly-job", "--field", "lock_id")
    held = holdfast("repo-lock", "run", "project", "--data-dir", root / "data", "--", "true")
    assert held.returncode == 0
    return Place(root, snapshot, issue, lock_id)


def offered(line: str, cwd: Path, shell: str = "bash", **env: str) -> list[str]:
    """The completions for a command line, in the format of the shell."""
    words = line.split(" ")
    asked = {
        "_HOLDFAST_COMPLETE": f"{shell}_complete",
        "COMP_WORDS": line,
        "COMP_CWORD": words[-1] if shell == "fish" else str(len(words) - 1),
    }
    result = holdfast(env={**asked, **env}, cwd=cwd)
    assert result.stderr == ""
    return result.stdout.splitlines()


def names(line: str, cwd: Path, **env: str) -> list[str]:
    return [each.partition(",")[2] for each in offered(line, cwd, **env) if each]


def test_existing_names_are_offered(place: Place) -> None:
    here = place.root / "main"

    assert names("holdfast lease status --worktree ", here) == ["experiment", "main"]
    assert names("holdfast worktree show e", here) == ["experiment"]
    assert names("holdfast worktree rename experiment ", here) == []
    assert names("holdfast show ", here) == ["head", "release-1", place.snapshot]
    assert names(f"holdfast diff {place.snapshot[:4]}", here) == [place.snapshot]
    assert names("holdfast worktree create x --from rel", here) == ["release-1"]
    assert names("holdfast ref delete ", here) == ["release-1"]
    assert names("holdfast issue show ", here) == [place.issue]
    assert names("holdfast dep add x ", here) == [place.issue]
    assert names(f"holdfast issue claim {place.issue[:3]}", here) == [place.issue]
    assert names("holdfast gate require x ", here) == ["review"]
    assert names("holdfast lease release --lock-id ", here) == [place.lock_id]
    assert names("holdfast run --name ", here) == names("holdfast lease status --name n", here) == ["nightly-job"]


def test_names_come_from_the_repository_that_the_command_would_use(place: Place, tmp_path: Path) -> None:
    line = "holdfast worktree show "

    assert names(line, tmp_path) == []
    assert names(f"holdfast lease status --repo {place.root} --worktree ", tmp_path) == ["experiment", "main"]
    assert names(line, tmp_path, HOLDFAST_REPO=str(place.root)) == ["experiment", "main"]
    assert names("holdfast repo-lock status ", tmp_path, HOLDFAST_DATA_DIR=str(place.root / "data")) == ["project"]


def test_zsh_and_fish_get_a_description_of_each_name(place: Place) -> None:
    fish = offered("holdfast issue show ", place.root, "fish")
    zsh = offered("holdfast issue show ", place.root, "zsh")
    snapshot = "\n".join(offered("holdfast show ", place.root, "fish"))

    assert place.issue in "\n".join(fish)
    assert "Write the parser" in "\n".join(fish)
    assert zsh == ["plain", place.issue, "Write the parser"]
    assert "the beginning" in snapshot
    assert "\x1b" not in snapshot


def test_damaged_files_never_cause_an_error_message(place: Place, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    (broken / ".jvs/locks").mkdir(parents=True)
    (broken / ".jvs/locks/x.json").write_text("[")
    (broken / ".jvs/refs").write_text("not a directory")
    (broken / ".jit/issues").mkdir(parents=True)
    (broken / ".jit/issues/4f1c.json").write_text('{"title": 3}')
    (broken / ".jit/gates.json").write_text('{"gates": []}')

    assert names("holdfast lease release --lock-id ", broken) == []
    assert names("holdfast ref delete ", broken) == []
    assert names("holdfast issue show ", broken) == ["4f1c"]
    assert names("holdfast gate require x ", broken) == []


def test_completion_loads_no_slow_module(place: Place) -> None:
    program = (
        "import os, sys; sys.argv = ['holdfast']\n"
        "from holdfast.__main__ import main\n"
        "main(); print(*{'msgspec', 'psutil', 'rich'}.intersection(sys.modules), file=sys.stderr)"
    )
    asked = {"_HOLDFAST_COMPLETE": "bash_complete", "COMP_WORDS": "holdfast show ", "COMP_CWORD": "2"}
    result = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        env=environment(asked),
        cwd=place.root,
    )

    assert place.snapshot in result.stdout
    assert result.stderr.split() == []


# --- Every parameter is covered --------------------------------------------------------------------------

NAMING = {"ID", "[ID]", "ISSUE", "SNAPSHOT", "NAME", "KEY", "KEY...", "[KEY]...", "PIN", "REPO_ID"}
NOT_COMPLETED = {
    ("worktree adopt", "name"),  # a new one
    ("join", "name"),
    ("snapshot", "tag"),
    ("ledger release", "claim_id"),
    ("ledger extend", "claim_id"),
    ("gc run", "plan_id"),
    ("gate define", "key"),
}


def parameters(
    command: click.Command = holdfast_command, path: tuple[str, ...] = ()
) -> Iterator[tuple[str, click.Parameter]]:
    context = click.Context(command, info_name=" ".join(path))
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            below = command.get_command(context, name)
            assert below is not None
            yield from parameters(below, (*path, name))
    if not isinstance(command, click.Group) or command.invoke_without_command:
        yield from ((" ".join(path), each) for each in command.params)


def test_every_parameter_that_takes_a_name_has_completions() -> None:
    missing = [
        (path, parameter.name)
        for path, parameter in parameters()
        if parameter.metavar in NAMING and parameter.name != "field"
        if (path, parameter.name) not in NOT_COMPLETED and source_of(path, parameter) is None
    ]
    assert missing == []


# --- A real shell ---------------------------------------------------------------------------------------


@pytest.mark.skipif(shutil.which("bash") is None or sys.platform != "linux", reason="needs bash on a terminal")
def test_the_tab_key_completes_a_name_in_a_real_bash(place: Place, tmp_path: Path) -> None:
    import pty

    command = tmp_path / "holdfast"
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m holdfast "$@"\n')
    command.chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    main, terminal = pty.openpty()
    shell = subprocess.Popen(
        ["bash", "--norc", "--noprofile", "-i"],
        stdin=terminal,
        stdout=terminal,
        stderr=terminal,
        cwd=place.root,
        start_new_session=True,
        env=environment({"PATH": path, "PS1": "> ", "TERM": "dumb", "INPUTRC": "/dev/null"}),
    )
    os.close(terminal)
    try:
        write(main, 'eval "$(holdfast completion bash)"; echo rea"dy"\n')
        read_until(main, "ready\r\n")
        write(main, "holdfast worktree path exp\t")
        read_until(main, "exp" + "eriment")
        write(main, "\n")
        assert str(place.root / "worktrees/experiment") in read_until(main, "worktrees/experiment")
        write(main, f"holdfast issue show --field title {place.issue[:4]}\t")
        read_until(main, place.issue)
        write(main, "\n")
        read_until(main, "Write the parser")
    finally:
        shell.kill()
        shell.wait()
        os.close(main)


def write(terminal: int, text: str) -> None:
    os.write(terminal, text.encode())


def read_until(terminal: int, text: str) -> str:
    """Read from the terminal up to and including this text."""
    shown = ""
    deadline = time.monotonic() + 2 * PATIENCE
    while text not in shown:
        ready, _, _ = select.select([terminal], [], [], max(0.0, deadline - time.monotonic()))
        assert ready, f"{text!r} never appeared: {shown!r}"
        with contextlib.suppress(BlockingIOError):
            shown += os.read(terminal, 4096).decode(errors="replace")
    return shown
