"""`holdfast top` in a real terminal: its pages and keys, its size, and the state in which it leaves the terminal."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import psutil
import pytest

from holdfast.cli import styled
from holdfast.cli.screen import keys_in
from holdfast.cli.styled import Column, Span
from holdfast.repository import live
from holdfast.repository.repository import Repository
from holdfast.store.open import open_store
from holdfast.store.watch import FileWatch
from tests.cli.commands import HOLDFAST, Running, holdfast, python
from tests.support.tmux import Terminal

if sys.platform != "linux":
    pytest.skip("needs a Linux terminal", allow_module_level=True)

CLOCK = re.compile(r"\d\d:\d\d:\d\d")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    directory = tmp_path / "root"
    for command in (("init", directory), ("issue", "init", "--repo", directory)):
        assert holdfast(*command).returncode == 0
    return directory


def start(terminal: Terminal, root: Path) -> str:
    terminal.command([*HOLDFAST, "top", "--repo", root])
    return terminal.wait_for(lambda screen: "q quit" in screen and "reading" not in screen)


def process_of(terminal: Terminal) -> psutil.Process:
    (shell,) = [psutil.Process(int(terminal.fact("pane_pid")))]
    (found,) = shell.children()
    return found


def create(root: Path, *arguments: str) -> str:
    return holdfast("issue", "create", *arguments, "--field", "id", "--repo", root).stdout.strip()


def test_the_pages_the_details_and_the_filter(terminal: Terminal, root: Path) -> None:
    parser, lexer = create(root, "Fix the parser"), create(root, "Write the \x1b[31mlexer")
    assert holdfast("issue", "claim", parser, "--actor", "agent:a", "--repo", root).returncode == 0
    start(terminal, root)
    terminal.wait_for("agent:a")

    terminal.keys("2")
    queue = terminal.wait_for(lexer[:8])
    assert "\\x1b[31mlexer" in queue
    terminal.keys("/")
    terminal.keys("parser", "Enter")
    filtered = terminal.wait_for("filter: parser")
    assert (parser[:8] in filtered, lexer[:8] in filtered) == (True, False)
    terminal.keys("Escape")
    terminal.wait_for(lexer[:8])

    terminal.keys("Down", "Enter")
    details = terminal.wait_for("Esc back")
    assert f"holdfast issue show {lexer[:8]}" in details
    terminal.keys("Escape")
    terminal.wait_for("q quit   Enter details")

    terminal.keys("Tab")
    terminal.wait_for("Nothing is queued to land")
    terminal.keys("?")
    terminal.wait_for("read everything again")
    terminal.keys("?", "1", "Enter")  # faster than frames are drawn
    assert "free in" in terminal.wait_for("to get it")
    terminal.keys("q")
    terminal.wait_for(lambda screen: screen.rstrip().endswith("$"))


def test_what_other_processes_do_appears_without_a_key(terminal: Terminal, root: Path) -> None:
    start(terminal, root)
    terminal.wait_for("Nobody holds anything")
    with Running("run", "--repo", root, "--purpose", "build", "--", "sleep", "99") as agent:
        terminal.wait_for(lambda screen: "build" in screen and "alive" in screen)
        agent.kill()
        agent.process.wait()
        terminal.wait_for("dead")
    assert "is gone" in terminal.screen(), "what needs attention comes first"


def test_while_nothing_changes_only_the_clock_is_drawn_and_nothing_is_read(
    terminal: Terminal, root: Path, tmp_path: Path
) -> None:
    start(terminal, root)
    process = process_of(terminal)
    before = -1
    while before != (before := process.io_counters().read_count):  # until everything was read
        tick(terminal)
    terminal.record(tmp_path / "written")
    tick(terminal)
    read_before = process.io_counters().read_count
    tick(terminal)
    tick(terminal)

    assert process.io_counters().read_count == read_before
    terminal.keys("q")
    terminal.wait_for(lambda screen: screen.rstrip().endswith("$"))
    written = (tmp_path / "written").read_text().partition("\x1b[?25h")[0]
    frames = written.split("\x1b[?2026h")[1:]
    assert len(frames) >= 2
    assert {re.sub(CLOCK, "", each) for each in frames} == {re.sub(CLOCK, "", frames[0])}
    assert all("\x1b[2J" not in each and each.count("\x1b[K") == 1 for each in frames), "one line each"


def tick(terminal: Terminal) -> None:
    """Wait until the clock on the screen has moved on."""
    (now,) = CLOCK.findall(terminal.screen())
    terminal.wait_for(lambda screen: now not in screen)


def test_every_watch_of_files_is_told_by_the_kernel(root: Path) -> None:
    """A family whose members have directories of their own would be polled."""
    before = sorted(root.rglob("*"))
    with contextlib.closing(open_store(root)) as store:
        for each in (*live.OF_REPOSITORY, *live.OF_TRACKER, *live.OF_LEDGER):
            with store.watch(each) as watch:
                assert isinstance(watch, FileWatch)
                assert watch._events is not None, each.name
    assert sorted(root.rglob("*")) == before, "watching changes nothing"


@pytest.fixture
def fifty(root: Path) -> Iterator[Path]:
    """A repository in which fifty agents have leased a worktree each."""
    repository = Repository(root)
    for number in range(1, 50):
        repository.worktrees.create(f"w{number:02}")
    names = ["main", *(f"w{number:02}" for number in range(1, 50))]
    held = [Repository(root, actor=f"agent:{each}").lease(each, ttl=600, purpose=f"work on {each}") for each in names]
    yield root
    for each in held:
        each.release()


def test_fifty_agents_scroll_and_every_size_fits(terminal: Terminal, fifty: Path) -> None:
    start(terminal, fifty)
    first = terminal.wait_for("50 rows")
    assert sum("agent:" in line for line in first.splitlines()) > 20
    terminal.keys("End")
    last = terminal.wait_for("agent:w49")
    assert "agent:main" not in last
    for columns, lines in ((60, 12), (20, 6), (200, 50)):
        terminal.resize(columns, lines)
        terminal.wait_for(partial(fills, columns, lines))
    terminal.keys("/", "w4", "Enter")
    assert terminal.wait_for("filter: w4").count("agent:w4") == 10


def fills(columns: int, lines: int, screen: str) -> bool:
    """Whether a frame was drawn for this size: its first and last line, and the columns that fit."""
    shown = screen.splitlines()
    whole = len(shown) == lines and shown[0].startswith("holdfast  1 Over") and "q quit" in shown[-1]
    return whole and ("SINCE" in screen) == (columns == 200) and all(len(line) <= columns for line in shown)


CRASH = python(
    "import sys; from holdfast.cli import top; from holdfast.__main__ import main\n"
    "def press(state, key): raise RuntimeError('planted')\n"
    "top.TopState.press = press; sys.argv = ['holdfast', 'top', *sys.argv[1:]]; sys.exit(main())"
)


@pytest.mark.parametrize(
    ("end", "message"),
    [
        (lambda terminal: process_of(terminal).send_signal(signal.SIGTERM), "143"),
        (lambda terminal: process_of(terminal).send_signal(signal.SIGHUP), "129"),
        (lambda terminal: terminal.keys("C-c"), "0"),
        (lambda terminal: terminal.keys("x"), "1"),
    ],
    ids=["SIGTERM", "SIGHUP", "Ctrl-C", "exception"],
)
def test_the_terminal_is_left_as_it_was(
    terminal: Terminal, root: Path, end: Callable[[Terminal], None], message: str, request: pytest.FixtureRequest
) -> None:
    crashes = request.node.callspec.id == "exception"
    terminal.command(["stty", "-g"])
    settings = terminal.wait_for(lambda screen: re.search(r"^[0-9a-f:]{40,}$", screen, re.MULTILINE))
    terminal.command([*(CRASH if crashes else [*HOLDFAST, "top"]), "--repo", root])
    terminal.wait_for("q quit")
    assert (terminal.fact("alternate_on"), terminal.fact("cursor_flag")) == ("1", "0")

    end(terminal)
    terminal.wait_for(lambda screen: terminal.fact("alternate_on") == "0")
    terminal.keys("clear; stty -g; echo status=$?", "Enter")
    terminal.wait_for("status=0")
    after = terminal.wait_for(lambda screen: re.search(r"^[0-9a-f:]{40,}$", screen, re.MULTILINE))

    assert terminal.fact("cursor_flag") == "1"
    assert re.findall(r"^[0-9a-f:]{40,}$", after, re.MULTILINE)[0] in settings


def test_it_stops_and_continues_like_any_other_program(terminal: Terminal, root: Path) -> None:
    start(terminal, root)
    terminal.keys("C-z")
    terminal.wait_for("Stopped")
    assert terminal.fact("alternate_on") == "0"
    terminal.keys("fg", "Enter")
    terminal.wait_for("Nobody holds anything")
    terminal.keys("q")
    terminal.wait_for(lambda screen: terminal.fact("alternate_on") == "0")


# --- Parts ------------------------------------------------------------------------------------------------


COLUMNS = (Column("NAME", 0, 4), Column("TEXT", 2, 6), Column("MORE", 1))


@pytest.mark.parametrize(
    ("width", "expected"),
    [
        (None, "agent:one  some long text  yes"),
        (31, "agent:one  some long text  yes"),
        (26, "agent:one  some lon…  yes"),
        (19, "agen…  some …  yes"),
        (12, "agent…  yes"),
        (3, "ag…"),
    ],
)
def test_columns_are_cut_and_then_dropped(width: int | None, expected: str) -> None:
    row = [Span("agent:one"), Span("some long text"), Span("yes")]
    line = styled.as_text(styled.table(COLUMNS, [row], width)[1], colour=False)

    assert re.sub(" +", " ", line).strip() == re.sub(" +", " ", expected)
    assert width is None or len(line) <= width


def test_wide_characters_count_twice() -> None:
    assert styled.cut("日本語", 5) == "日本…"
    assert styled.padded("日本語", 5) == "日本…"
    assert styled.padded("日", 4) == "日  "


def test_keys_have_names_and_text_is_text() -> None:
    assert list(keys_in("a\x1b[Bé\x1b\r")) == ["a", "down", "é", "escape", "enter"]


def test_colours_are_for_terminals_that_want_them(monkeypatch: pytest.MonkeyPatch) -> None:
    import pty

    main, other = pty.openpty()
    with os.fdopen(main), os.fdopen(other, "w") as stream:
        monkeypatch.setenv("TERM", "xterm")
        monkeypatch.delenv("NO_COLOR", raising=False)
        assert styled.has_colour(stream)
        monkeypatch.setenv("NO_COLOR", "1")
        assert not styled.has_colour(stream)
        monkeypatch.delenv("NO_COLOR")
        monkeypatch.setenv("TERM", "dumb")
        assert not styled.has_colour(stream)
    assert not styled.has_colour(None)
