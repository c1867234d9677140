"""A real terminal for tests: programs run in tmux, keys are typed, and the screen is read."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Self

import pytest

from tests.cli.commands import PATIENCE, environment

TMUX = shutil.which("tmux")
_LOOK_AGAIN = 0.05


class Terminal:
    """One terminal, in which a shell runs. Leaving the block ends the shell and what runs in it."""

    def __init__(self, directory: Path, columns: int = 120, lines: int = 30) -> None:
        self._socket = str(directory / "tmux")
        self._env = environment({"TERM": "xterm-256color", "PS1": "$ ", "TMUX": ""})
        size = ("-x", str(columns), "-y", str(lines))
        self._run("new-session", "-d", *size, "env PS1='$ ' bash --norc --noprofile -i")
        self.wait_for(lambda screen: "$" in screen)

    def _run(self, *arguments: str) -> str:
        command = [str(TMUX), "-f", os.devnull, "-S", self._socket, *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True, env=self._env).stdout

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *problem: object) -> None:
        self._run("kill-server")

    def command(self, arguments: Sequence[str | Path]) -> None:
        """Type a command line."""
        self._run("send-keys", "-l", shlex.join(map(str, arguments)))
        self.keys("Enter")

    def keys(self, *names: str) -> None:
        """Press keys, by the names that tmux has for them."""
        self._run("send-keys", *names)

    def screen(self) -> str:
        return self._run("capture-pane", "-p")

    def lines(self) -> list[str]:
        return self.screen().splitlines()

    def styled(self) -> str:
        """The screen with its colours."""
        return self._run("capture-pane", "-p", "-e")

    def fact(self, name: str) -> str:
        """A variable of tmux, such as `alternate_on` or `cursor_flag`."""
        return self._run("display-message", "-p", f"#{{{name}}}").strip()

    def resize(self, columns: int, lines: int) -> None:
        self._run("resize-window", "-x", str(columns), "-y", str(lines))

    def record(self, file: Path) -> None:
        """Copy everything that the program writes from now on to a file."""
        self._run("pipe-pane", f"cat > {shlex.quote(str(file))}")

    def wait_for(self, condition: Callable[[str], object] | str) -> str:
        """Wait until the screen contains a text, or a condition holds for it; return the screen."""
        deadline = time.monotonic() + PATIENCE
        while True:
            screen = self.screen()
            if (condition in screen) if isinstance(condition, str) else condition(screen):
                return screen
            assert time.monotonic() < deadline, f"timed out waiting for {condition!r}; on the screen:\n{screen}"
            time.sleep(_LOOK_AGAIN)


@pytest.fixture
def terminal(tmp_path: Path) -> Iterator[Terminal]:
    if TMUX is None:
        pytest.skip("needs tmux")
    with Terminal(tmp_path) as found:
        yield found
