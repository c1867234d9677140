"""What a command tells a person at a terminal while it works or waits; and colours, help, -q and -v."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Self

import pytest

from holdfast.cli import entry, progress
from holdfast.cli.output import wrapped
from tests.cli.commands import (
    HOLDFAST,
    FileLockHeld,
    RepoLockHeld,
    Running,
    holdfast,
    on_a_terminal,
    python,
    wait_until,
)
from tests.support.homes import git
from tests.support.tmux import Terminal

if sys.platform != "linux":
    pytest.skip("needs a Linux terminal", allow_module_level=True)

ESCAPE = "\x1b["


@pytest.fixture
def root(tmp_path: Path) -> Path:
    directory = tmp_path / "root"
    assert holdfast("init", directory).returncode == 0
    return directory


# --- Waiting ----------------------------------------------------------------------------------------------


def test_a_command_that_waits_says_for_what_and_leaves_no_trace(terminal: Terminal, root: Path, tmp_path: Path) -> None:
    env = {"HOLDFAST_ACTOR": "agent:a"}
    with Running("run", "--repo", root, "--ttl", "40s", "--", "sleep", "99", env=env) as holder:
        wait_until(lambda: "agent:a" in holdfast("who", "--repo", root).stdout)
        terminal.command([*HOLDFAST, "run", "--repo", root, "--wait", "60s", "--", "echo", "mine"])
        said = terminal.wait_for("waiting for")
        assert re.search(r"waiting for the worktree main \(held by agent:a, \d+s left\)…", said), said
        holder.send(15)
        holder.process.wait()
    after = terminal.wait_for(lambda screen: "\nmine" in screen)
    assert "waiting for" not in after

    with FileLockHeld(tmp_path / "f.lock") as other:
        terminal.command([*HOLDFAST, "lock", "run", tmp_path / "f.lock", "--wait", "60s", "--", "true"])
        assert f"pid {other.pid}" in terminal.wait_for("f.lock (held by")
    with RepoLockHeld(tmp_path / "data", "project") as other:
        place = ("--data-dir", tmp_path / "data", "--wait", "60s")
        terminal.command([*HOLDFAST, "repo-lock", "run", "project", *place, "--", "true"])
        terminal.wait_for(f"waiting for the lock of project (held by pid {other.pid})…")


def test_an_agent_that_waits_for_its_worktree_says_so(terminal: Terminal, root: Path) -> None:
    assert holdfast("issue", "init", "--repo", root).returncode == 0
    assert holdfast("issue", "create", "x", "--repo", root).returncode == 0
    assert holdfast("lease", "acquire", "--repo", root, env={"HOLDFAST_ACTOR": "agent:a"}).returncode == 0

    place = ("--repo", root, "--worktree", "main", "--actor", "agent:b")
    terminal.command([*HOLDFAST, "agent", "run", "--next", *place, "--wait", "60s", "--", "true"])

    terminal.wait_for("waiting for the worktree main (held by agent:a, ")
    terminal.keys("C-c")
    assert "waiting for" not in terminal.wait_for("E_INTERRUPTED")


@pytest.mark.parametrize("kind", ["ledger", "issue"])
def test_a_claim_that_waits_says_for_what(terminal: Terminal, root: Path, kind: str) -> None:
    assert holdfast(kind, "init", "--repo", root).returncode == 0
    wait = ("--repo", root, "--wait", "60s")
    if kind == "ledger":
        assert holdfast("ledger", "claim", "1.2", "--actor", "bob", "--repo", root).returncode == 0
        terminal.command([*HOLDFAST, "ledger", "claim", "1.2", "--actor", "carl", *wait])
        terminal.wait_for("waiting for the node 1.2 (held by bob, ")
    else:
        issue = holdfast("issue", "create", "x", "--field", "id", "--repo", root).stdout.strip()
        assert holdfast("issue", "claim", issue, "--actor", "agent:a", "--repo", root).returncode == 0
        terminal.command([*HOLDFAST, "issue", "claim-next", "--actor", "agent:b", *wait])
        terminal.wait_for("waiting for an issue that can be claimed (1 in progress by agent:a)…")
    terminal.keys("C-c")
    terminal.wait_for("E_INTERRUPTED")
    assert "waiting for an" not in terminal.screen()


def test_without_a_terminal_nothing_is_said_about_waiting(root: Path) -> None:
    assert holdfast("lease", "acquire", "--ttl", "1h", "--repo", root).returncode == 0

    refused = holdfast("run", "--repo", root, "--wait", "1200ms", "--", "true")

    assert refused.returncode == 75
    assert refused.stderr.startswith("Error: ")
    assert ("waiting for" in refused.stderr, ESCAPE in refused.stderr) == (False, False)


# --- Progress ---------------------------------------------------------------------------------------------

WORKS = """
import sys
from holdfast.cli.progress import showing
with showing("Capturing", total=10) as report:
    report(5, 2048)
    sys.stdin.readline()
print("done")
"""


def test_progress_is_one_line_that_disappears(terminal: Terminal) -> None:
    terminal.command(python(WORKS))
    terminal.wait_for("Capturing [##########..........] 5 of 10 files, 2 KiB")
    terminal.keys("C-d")  # the end of its input, which is not echoed
    assert "Capturing [" not in terminal.wait_for("\ndone")


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The last text of each status line, as if standard error were a terminal."""
    found: list[str] = []

    class Recorded(progress.StatusLine):
        def __enter__(self) -> Self:
            return self

        def __exit__(self, *problem: object) -> None:
            found.append(self._text())

    monkeypatch.setattr(progress, "is_shown", lambda: True)
    monkeypatch.setattr(progress, "StatusLine", Recorded)
    return found


def test_everything_that_may_take_long_shows_its_progress(
    tmp_path: Path, lines: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "source").mkdir()
    for number in range(3):
        (tmp_path / f"source/f{number}").write_text("content")
    monkeypatch.chdir(tmp_path)
    root = str(tmp_path / "root")

    def run(*arguments: str) -> str:
        del lines[:]
        assert entry.run(arguments) == 0
        return lines[-1] if lines else ""

    assert "Importing 3 files" in run("init", root, "--import", str(tmp_path / "source"))
    monkeypatch.chdir(f"{root}/main")
    assert "Capturing 3 files" in run("snapshot")
    assert "Creating 3 files" in run("worktree", "create", "w", "--from", "head")
    assert "] 3 of 3 files" in run("restore", "head")
    assert "] 3 of 3 files" in run("export", "head", str(tmp_path / "copy"))
    assert "] 1 of 1 snapshots" in run("verify")
    assert "Looking for snapshots to delete" in run("gc", "plan")
    assert "] 1 of 1 snapshots" in run("doctor", "--strict")
    assert "] 1 of 1 snapshots" in run("doctor", "--fix")
    assert "Verifying" in run("audit", "--verify")
    assert run("ledger", "init") == ""
    assert "Verifying" in run("ledger", "verify")
    run("issue", "init")
    (tmp_path / "issues").write_text('[{"id": "11111111-1111-4111-8111-111111111111", "title": "x"}]')
    assert "Importing" in run("issue", "import", str(tmp_path / "issues"))
    moved = run("migrate", root, "--to", f"file://{tmp_path}/elsewhere")
    assert re.search(r"Copying and comparing \[#{20}\] (\d+) of \1 records", moved)


def test_a_search_for_conflicts_shows_that_it_works(tmp_path: Path, lines: list[str]) -> None:
    git("init", "-q", at=tmp_path)
    git("commit", "-q", "--allow-empty", "-m", "x", at=tmp_path)
    assert holdfast("init", cwd=tmp_path).returncode == 0
    assert entry.run(["conflicts", "--repo", str(tmp_path)]) == 0
    assert "Comparing worktrees" in lines[-1]


def test_a_run_shows_the_progress_of_its_snapshot(
    root: Path, lines: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (root / "main/f").write_text("content")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert entry.run(["run", "--repo", str(root), "--snapshot", "--", "true"]) == 0
    assert "Capturing 1 files" in lines[-1]


def test_an_agent_says_that_its_worktree_is_prepared(terminal: Terminal, root: Path, tmp_path: Path) -> None:
    assert holdfast("issue", "init", "--repo", root).returncode == 0
    assert holdfast("issue", "create", "x", "--repo", root).returncode == 0
    setup = f"until test -e {tmp_path}/seen; do sleep 0.05; done"
    assert holdfast("config", "set", "worktree.setup", setup, "--repo", root).returncode == 0
    terminal.command([*HOLDFAST, "agent", "run", "--next", "--repo", root, "--", "echo", "begun"])
    terminal.wait_for("preparing the worktree…")
    (tmp_path / "seen").touch()
    assert "preparing" not in terminal.wait_for("\nbegun")


ASKS = """
from holdfast.cli.progress import saying
with saying("Pushing snapshots"):
    input("Passphrase? ")
print("done")
"""


def test_what_is_said_about_a_remote_leaves_room_for_a_question(
    terminal: Terminal, root: Path, lines: list[str]
) -> None:
    terminal.command(python(ASKS))
    terminal.wait_for("Pushing snapshots… Passphrase?")
    terminal.keys("Enter")
    terminal.wait_for("\ndone")
    for command, text in (("push", "Pushing snapshots… "), ("fetch", "Fetching snapshots… ")):
        assert f"{text}\r\x1b[K" in on_a_terminal("snapshot", command, "--repo", root, columns=80)
    assert entry.run(["deinit", "--repo", str(root)]) != 0  # not in a git checkout
    assert "Removing Holdfast" in lines[-1]


def test_a_collection_shows_how_many_snapshots_are_deleted(root: Path, lines: list[str], tmp_path: Path) -> None:
    for number in range(3):
        (root / "main/f").write_text(str(number))
        assert holdfast("snapshot", "--repo", root).returncode == 0
    assert holdfast("gc", "policy", "--keep-last", "1", "--repo", root).returncode == 0
    plan = holdfast("gc", "plan", "--json", "--repo", root).stdout
    (plan_id,) = re.findall(r'"plan":"([^"]+)"', plan)

    assert entry.run(["gc", "run", "--plan", plan_id, "--repo", str(root)]) == 0
    assert "] 2 of 2 snapshots" in lines[-1]


# --- Colours ----------------------------------------------------------------------------------------------


def test_differences_histories_and_errors_have_colours_on_a_terminal_only(root: Path) -> None:
    main = root / "main"
    (main / "f").write_text("old\n")
    assert holdfast("snapshot", "-m", "first", cwd=main).returncode == 0
    (main / "f").write_text("new \x1b[31m\n")

    patch = on_a_terminal("diff", "--patch", "--repo", root, columns=80)
    assert "\x1b[31m-old\x1b[0m" in patch
    assert "\x1b[32m+new \\x1b[31m\x1b[0m" in patch
    assert "\x1b[33mM f" in on_a_terminal("status", "--repo", root, columns=80)
    assert "\x1b[33m" in on_a_terminal("history", "--repo", root, columns=80)
    assert "\x1b[1;31mError:\x1b[0m" in on_a_terminal("show", "nothing", "--repo", root, columns=80)
    for command in (["diff", "--patch"], ["status"], ["history", "--graph"], ["show", "nothing"]):
        assert ESCAPE not in on_a_terminal(*command, "--repo", root, columns=80, NO_COLOR="1"), command
        piped = holdfast(*command, "--repo", root)
        assert ESCAPE not in piped.stdout + piped.stderr, command


def test_errors_wrap_at_words_on_a_terminal_and_nowhere_else(root: Path) -> None:
    assert holdfast("lease", "acquire", "--ttl", "1h", "--repo", root).returncode == 0

    narrow = on_a_terminal("lease", "steal", "--repo", root, columns=30)
    assert max(len(re.sub(r"\x1b\[[0-9;]*m", "", line)) for line in narrow.splitlines()) <= 30
    assert len(holdfast("lease", "steal", "--repo", root).stderr.splitlines()) == 5


def test_wrapping_keeps_the_indentation_and_whole_words() -> None:
    assert wrapped("  1. one two three", 10) == ["  1. one", "  two", "  three"]
    assert wrapped("see /a/very/long/path/name now", 10) == ["see", "/a/very/long/path/name", "now"]


# --- Help, -q and -v --------------------------------------------------------------------------------------


def test_help_names_a_command_as_the_arguments_do(root: Path) -> None:
    assert holdfast("help").stdout == holdfast("--help").stdout
    assert holdfast("help", "gc", "run").stdout == holdfast("gc", "run", "--help").stdout
    assert "Did you mean 'steal'?" in holdfast("help", "lease", "stael").stderr
    assert "has no command 'x'" in holdfast("help", "info", "x").stderr


def test_holdfast_alone_shows_the_overview_in_a_repository_and_the_help_elsewhere(root: Path, tmp_path: Path) -> None:
    assert holdfast(cwd=root / "main").stdout == "Nobody holds anything.\n"
    assert holdfast("-q", cwd=root / "main").stdout == "Nobody holds anything.\n"
    assert holdfast("--quiet", "-v", cwd=root / "main").stderr.startswith("holdfast: ")
    assert holdfast("-v", cwd=tmp_path).returncode == 2
    assert holdfast(cwd=tmp_path, env={"HOLDFAST_REPO": str(root)}).stdout == "Nobody holds anything.\n"
    elsewhere = holdfast(cwd=tmp_path)
    assert (elsewhere.returncode, elsewhere.stdout) == (2, "")
    assert elsewhere.stderr.startswith("Usage: holdfast")


def test_verbose_adds_the_time_on_standard_error(root: Path) -> None:
    told = holdfast("-v", "info", "--repo", root)

    assert re.fullmatch(r"holdfast: \d+\.\d{3} s, exit status 0\n", told.stderr)
    assert told.stdout == holdfast("-q", "info", "--repo", root).stdout
    assert "Traceback" not in holdfast("-v", "show", "nothing", "--repo", root).stderr
    assert holdfast("worktree", "list", "--repo", root, "-v").stderr.startswith("holdfast: ")
    assert holdfast("run", "-v", "--repo", root, "--", "echo", "-v").stdout == "-v\n"
    assert holdfast("run", "--repo", root, "--", "echo", "-v").stderr == ""


def test_quiet_leaves_out_warnings_but_not_from_the_envelope(capsys: pytest.CaptureFixture[str]) -> None:
    from holdfast.cli.output import Output

    for as_json, quiet, expected in ((False, False, "Warning: late\n"), (False, True, "")):
        output = Output(as_json=as_json)
        output.quiet = quiet
        output.warning("late")
        assert capsys.readouterr().err == expected
    output = Output(as_json=True)
    output.quiet = True
    output.warning("late")
    output.result({})
    assert '"warnings":["late"]' in capsys.readouterr().out
