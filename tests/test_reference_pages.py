"""The generated reference pages match the code."""

from __future__ import annotations

import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest

from holdfast.cli.entry import COMMANDS, MEANINGS
from holdfast.errors import ExitStatus
from tools.generate_reference import DIRECTORY, PAGES


@pytest.mark.parametrize("name", PAGES)
def test_the_page_is_current(name: str) -> None:
    committed = (DIRECTORY / name).read_text(encoding="utf-8")

    assert committed == PAGES[name](), "run `make docs` and commit the result"


def lint(page: Path) -> list[str]:
    """What the formatters of man pages on this machine complain about."""
    if shutil.which("mandoc"):
        found = subprocess.run(
            ["mandoc", "-T", "lint", "-W", "warning", str(page)], capture_output=True, text=True
        ).stdout
    elif shutil.which("groff"):
        command = ["groff", "-man", "-ww", "-Tutf8", "-z", "-K", "utf8", str(page)]
        found = subprocess.run(command, capture_output=True, text=True).stderr
    else:
        pytest.skip("needs mandoc or groff")
    return found.splitlines()


def test_the_man_page_is_sound_and_names_every_command(tmp_path: Path) -> None:
    page = DIRECTORY / "holdfast.1"
    assert lint(page) == []
    text = page.read_text(encoding="utf-8").replace("\\-", "-")
    assert all((f".SS holdfast {name}\n" in text) is not entry.hidden for name, entry in COMMANDS.items())

    (tmp_path / "broken.1").write_text(page.read_text(encoding="utf-8") + ".nosuchrequest\n", encoding="utf-8")
    assert lint(tmp_path / "broken.1"), "a broken page is noticed"


def test_the_wheel_installs_the_man_page() -> None:
    settings = tomllib.loads((DIRECTORY.parents[1] / "pyproject.toml").read_text(encoding="utf-8"))
    shared = settings["tool"]["hatch"]["build"]["targets"]["wheel"]["shared-data"]
    assert shared == {"docs/reference/holdfast.1": "share/man/man1/holdfast.1"}


def test_every_exit_status_has_a_distinct_meaning() -> None:
    assert set(MEANINGS) == set(ExitStatus)
    assert len(set(MEANINGS.values())) == len(ExitStatus)
