"""Help, completion and version, and the modules that they load."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

import holdfast as package
from holdfast.cli.entry import COMMANDS, MEANINGS, root
from tests.cli.commands import HOLDFAST, data, environment, holdfast
from tools.command_reference import commands_page


def commands(context: click.Context | None = None) -> Iterator[click.Context]:
    """Every command that is neither a group nor hidden."""
    context = context or click.Context(root, info_name="holdfast", **root.context_settings)
    if not isinstance(context.command, click.Group) or context.command.invoke_without_command:
        yield context
    if not isinstance(context.command, click.Group):
        return
    for name in context.command.list_commands(context):
        command = context.command.get_command(context, name)
        if command is not None and not command.hidden:
            yield from commands(click.Context(command, info_name=name, parent=context))


ALL = list(commands())


def path_of(context: click.Context) -> str:
    return context.command_path


# --- Help -------------------------------------------------------------------------------------------


def test_the_help_has_a_summary_examples_and_exit_statuses() -> None:
    result = holdfast("--help")
    text = " ".join(result.stdout.split())

    assert (result.returncode, result.stderr) == (0, "")
    assert "Holdfast lets many agents and people work in one repository at the same time" in text
    assert result.stdout.count("\n    holdfast ") == 5
    assert all(f"{int(status)} {meaning}" in text for status, meaning in MEANINGS.items())
    assert all((name in result.stdout) is not entry.hidden for name, entry in COMMANDS.items())


def test_without_any_argument_the_help_is_shown_as_an_error() -> None:
    result = holdfast()

    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr == holdfast("-h").stdout


def test_a_group_without_a_command_shows_its_help_as_an_error() -> None:
    result = holdfast("repo-lock")

    assert (result.returncode, result.stdout) == (2, "")
    assert "Commands:\n  run" in result.stderr


@pytest.mark.parametrize("context", ALL, ids=path_of)
def test_every_command_has_an_example_takes_json_and_explains_its_options(context: click.Context) -> None:
    options = [each for each in context.command.params if isinstance(each, click.Option) and not each.hidden]

    assert f"  {context.command_path}" in (context.command.help or "") or context.info_name == "completion"
    assert "--json" in [name for option in options for name in option.opts]
    assert all(option.help for option in options)


@pytest.mark.parametrize("context", ALL, ids=path_of)
def test_every_help_text_fits_into_80_columns(context: click.Context) -> None:
    context.terminal_width = 80

    assert max(map(len, context.get_help().splitlines())) <= 80


def test_the_reference_page_has_a_section_for_every_command() -> None:
    page = commands_page()

    assert all((f"## holdfast {name}\n" in page) is not entry.hidden for name, entry in COMMANDS.items())
    assert all(f"## {context.command_path}\n" in page for context in ALL)


def test_the_version_is_that_of_the_package() -> None:
    assert holdfast("--version").stdout == f"holdfast {package.__version__}\n"


def test_the_version_is_the_same_on_the_slow_path() -> None:
    result = holdfast("--version", "lock")

    assert (result.returncode, result.stdout) == (0, f"holdfast {package.__version__}\n")


# --- Loaded modules ---------------------------------------------------------------------------------

HEAVY = {
    "argparse",
    "asyncio",
    "dataclasses",
    "json",
    "logging",
    "multiprocessing",
    "psutil",
    "rich",
    "socket",
}


def modules_loaded_by(*arguments: str) -> set[str]:
    """The modules that a command has loaded when it ends."""
    program = (
        "import sys, os; from holdfast.__main__ import main; sys.argv = ['holdfast', *sys.argv[1:]]\n"
        "status = main(); loaded = sorted(sys.modules); import json\n"
        "os.write(2, json.dumps([status, loaded]).encode())"
    )
    result = subprocess.run(
        [sys.executable, "-c", program, *arguments], capture_output=True, text=True, env=environment()
    )
    status, loaded = json.loads(result.stderr.splitlines()[-1])
    assert status == 0
    return set(loaded)


def test_asking_for_the_version_loads_next_to_nothing() -> None:
    loaded = modules_loaded_by("--version")

    assert not loaded & {*HEAVY, "click", "ctypes", "inspect", "pathlib", "subprocess"}
    assert {name for name in loaded if name.startswith("holdfast")} == {"holdfast", "holdfast.__main__"}


def test_the_help_loads_none_of_the_commands() -> None:
    loaded = modules_loaded_by("--help")

    assert not loaded & {entry.place.partition(":")[0] for entry in COMMANDS.values()}
    assert not {name for name in loaded if name.startswith("holdfast.locks")}
    assert not loaded & {*HEAVY, "ctypes", "pathlib", "subprocess"}


@pytest.mark.skipif(sys.platform != "linux", reason="other platforms need psutil to inspect processes")
@pytest.mark.parametrize(
    ("arguments", "allowed"),
    [
        (["lock", "status", "/nowhere/x"], set[str]()),
        (["lock", "run", "{directory}/a.lock", "--", "true"], set[str]()),
        (["repo-lock", "status", "--data-dir", "/nowhere"], {"json"}),
        (["completion", "bash"], set[str]()),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_command_loads_only_the_modules_it_uses(arguments: list[str], allowed: set[str], tmp_path: Path) -> None:
    loaded = modules_loaded_by(*(each.format(directory=tmp_path) for each in arguments))
    others = {entry.place.partition(":")[0] for name, entry in COMMANDS.items() if name != arguments[0]}

    assert not loaded & (HEAVY - allowed)
    assert not loaded & others


# --- Completion -------------------------------------------------------------------------------------


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_completion_script_is_valid(shell: str) -> None:
    result = holdfast("completion", shell)

    assert (result.returncode, result.stderr) == (0, "")
    assert "_HOLDFAST_COMPLETE" in result.stdout
    assert data(holdfast("completion", shell, "--json")) == {"shell": shell, "script": result.stdout}
    if shutil.which(shell):
        check = subprocess.run([shell, "-n"], input=result.stdout, text=True, capture_output=True)
        assert (check.returncode, check.stderr) == (0, "")


def completions(line: str) -> list[str]:
    """The completions for a command line in bash."""
    words = line.split(" ")
    env = {
        "_HOLDFAST_COMPLETE": "bash_complete",
        "COMP_WORDS": line,
        "COMP_CWORD": str(len(words) - 1),
    }
    result = subprocess.run(HOLDFAST, capture_output=True, text=True, env=environment(env), check=True)
    return [each.partition(",")[2] for each in result.stdout.splitlines()]


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("holdfast ", [name for name, entry in COMMANDS.items() if not entry.hidden]),
        ("holdfast loc", ["lock"]),
        ("holdfast repo-lock ", ["run", "status", "break"]),
        ("holdfast completion ", ["bash", "zsh", "fish"]),
        ("holdfast lock run x --conf", ["--conflict-status"]),
        ("holdfast lock run x -- ma", ["ma"]),
    ],
)
def test_the_shell_gets_the_possible_completions(line: str, offered: list[str]) -> None:
    assert completions(line) == offered
