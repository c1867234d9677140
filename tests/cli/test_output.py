"""The output of the commands, for people and for programs, and their exit statuses."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import NoReturn

import pytest

from holdfast.cli import entry
from holdfast.cli.entry import MEANINGS, asks_for_json, root
from holdfast.cli.output import Output, printable
from holdfast.errors import ExitStatus, IoFailure, LockConflict
from holdfast.fs import durable
from tests.cli.commands import HOLDFAST, environment, error, holdfast

# --- Usage ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments",
    [
        ["--json", "nonsense"],
        ["nonsense", "--json"],
        ["lock", "--json"],
        ["lock", "status", "--json"],
        ["lock", "status", "x", "y", "--json"],
        ["repo-lock", "status", "--json", "--nonsense"],
        ["completion", "tcsh", "--json"],
        ["demo", "--workers", "1", "--json"],
    ],
    ids=" ".join,
)
def test_a_usage_error_is_an_envelope_wherever_json_is_requested(arguments: list[str]) -> None:
    result = holdfast(*arguments)

    assert (result.returncode, result.stderr) == (2, "")
    failure = error(result)
    assert failure["code"] == "E_USAGE"
    assert failure["retryable"] is False
    assert "--help" in failure["hint"]


def test_a_usage_error_for_people_shows_the_usage_on_standard_error() -> None:
    result = holdfast("lock", "status")

    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.startswith("Error: Missing argument 'FILE'.\n\nUsage: holdfast lock status")
    assert "See 'holdfast lock status --help'." in result.stderr


def test_a_misspelled_command_gets_a_suggestion() -> None:
    assert "Did you mean 'repo-lock'?" in holdfast("rpeo-lock").stderr


@pytest.mark.parametrize(
    ("arguments", "asked"),
    [
        (["status", "--json"], True),
        (["run", "--json", "--", "x"], True),
        (["run", "--", "x", "--json"], False),
        (["run"], False),
    ],
)
def test_arguments_after_the_dashes_do_not_request_json(arguments: list[str], asked: bool) -> None:
    assert asks_for_json(arguments) is asked


# --- Output for people ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain, und größer", "plain, und größer"),
        ("\x1b[31mred", "\\x1b[31mred"),
        ("two\nlines\r\t", "two\\nlines\\r\\t"),
        ("\x9b31m", "\\x9b31m"),
        ("right\u202eleft", "right\\u202eleft"),
        ("\udcff", "\\udcff"),
    ],
)
def test_only_printable_characters_are_shown_unescaped(text: str, shown: str) -> None:
    assert printable(text) == shown


def test_a_name_with_escape_sequences_cannot_control_the_terminal(tmp_path: Path) -> None:
    name = "a\x1b[2J\nError: forged"
    shown = holdfast("lock", "status", name, cwd=tmp_path)
    failed = holdfast("lock", "status", f"{name}/below", cwd=tmp_path)
    missing = holdfast("lock", "run", f"{name}/below", "--", "true", cwd=tmp_path)

    assert shown.stdout.count("\n") == 1
    for result in (shown, failed, missing):
        assert "\x1b" not in result.stdout + result.stderr
    assert "a\\x1b[2J\\nError: forged/below" in missing.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="file names are Unicode on other platforms")
def test_a_name_that_is_not_unicode_is_shown_to_people_and_programs(tmp_path: Path) -> None:
    for arguments in ([b"a\xff.lock"], [b"a\xff.lock", b"--json"]):
        result = subprocess.run(
            [*HOLDFAST, "lock", "status", *arguments],
            capture_output=True,
            env=environment(),
            cwd=tmp_path,
        )
        assert result.returncode == 0
        assert rb"a\udcff.lock" in result.stdout.replace(rb"\\", b"\\")


def test_an_ascii_terminal_gets_only_ascii(tmp_path: Path) -> None:
    result = holdfast(
        "lock", "status", "größer", cwd=tmp_path, env={"PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"}, as_child=True
    )

    assert result.stdout == "gr\\xf6\\xdfer: free (the file does not exist yet)\n"


# --- Output for programs ----------------------------------------------------------------------------


def test_a_failure_is_reported_with_its_details(capsys: pytest.CaptureFixture[str]) -> None:
    Output(as_json=True).failure(LockConflict("held", path=Path("/x"), holders=[{"pid": 1}]))

    assert json.loads(capsys.readouterr().out) == {
        "schema_version": 1,
        "ok": False,
        "error": {
            "code": "E_LOCK_CONFLICT",
            "message": "held",
            "retryable": True,
            "hint": LockConflict.hint,
            "path": "/x",
            "holders": [{"pid": 1}],
        },
    }


def test_an_envelope_is_always_one_line_of_ascii(capsys: pytest.CaptureFixture[str]) -> None:
    Output(as_json=True).result({"a\nb": ["\x1b", "\x9b", "ö", "\udcff", ("\u2028",)]})
    line = capsys.readouterr().out

    assert line.isascii()
    assert line.removesuffix("\n").isprintable()
    assert json.loads(line)["data"] == {"a\nb": ["\x1b", "\x9b", "ö", "\\udcff", ["\u2028"]]}


# --- Unexpected errors ------------------------------------------------------------------------------


def defective(*_: object, **__: object) -> NoReturn:
    raise ZeroDivisionError("a defect")


def test_an_unexpected_error_is_reported_without_a_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(root, "invoke", defective)
    status = entry.run(["lock", "status", "x", "--json"])
    output = capsys.readouterr()

    assert status == 1
    assert output.err == ""
    failure = json.loads(output.out)["error"]
    assert (failure["code"], failure["message"]) == ("E_UNEXPECTED", "ZeroDivisionError: a defect")
    assert "report" in failure["hint"]


def test_an_unexpected_error_is_reported_with_a_traceback_in_debug_mode(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(root, "invoke", defective)
    monkeypatch.setenv("HOLDFAST_DEBUG", "1")

    assert entry.run(["lock", "status", "x"]) == 1
    assert "Traceback (most recent call last)" in capsys.readouterr().err


def test_an_interrupt_exits_with_130(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted(*_: object) -> NoReturn:
        raise KeyboardInterrupt

    monkeypatch.setattr(root, "invoke", interrupted)

    assert entry.run(["lock", "status", "x"]) == 130
    assert capsys.readouterr().err.startswith("Error: interrupted")


@pytest.mark.parametrize(
    "arguments",
    [["--version"], ["--help"], ["lock", "status", "x"], ["lock", "status", "x", "--json"]],
)
def test_a_closed_pipe_ends_the_command_without_a_message(arguments: list[str], tmp_path: Path) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    try:
        result = subprocess.run(
            [*HOLDFAST, *arguments], stdout=writing, stderr=subprocess.PIPE, env=environment(), cwd=tmp_path
        )
    finally:
        os.close(writing)

    assert (result.returncode, result.stderr) == (1, b"")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize("options", [[], ["--json"]])
def test_output_that_cannot_be_written_is_an_error(options: list[str], tmp_path: Path) -> None:
    with Path("/dev/full").open("wb") as full:
        result = subprocess.run(
            [*HOLDFAST, "lock", "status", "x", *options],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            env=environment(),
            cwd=tmp_path,
        )

    assert result.returncode == 1
    assert "cannot write to standard output: No space left on device" in result.stderr
    assert len(result.stderr.splitlines()) == 1
    if options:
        assert error(result, on="stderr")["code"] == "E_IO"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_help_that_cannot_be_written_is_an_error(unbuffered: str, tmp_path: Path) -> None:
    with Path("/dev/full").open("wb") as full:
        result = subprocess.run(
            [*HOLDFAST, "lease", "--help"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            env=environment() | {"PYTHONUNBUFFERED": unbuffered},
            cwd=tmp_path,
        )

    assert (result.returncode, "E_IO" in result.stderr, len(result.stderr.splitlines())) == (1, True, 1)


@pytest.mark.skipif(sys.platform == "win32", reason="needs a POSIX shell")
def test_a_command_works_without_standard_output(tmp_path: Path) -> None:
    result = subprocess.run(
        ["/bin/sh", "-c", 'exec "$@" >&- 2>&-', "sh", *HOLDFAST, "lock", "run", "x", "--", "touch", "y"],
        env=environment(),
        cwd=tmp_path,
    )

    assert result.returncode == 0
    assert (tmp_path / "y").exists()
    assert (tmp_path / "x").read_bytes() == b""


def test_every_exit_status_has_a_meaning() -> None:
    assert set(MEANINGS) == set(ExitStatus)


@pytest.mark.parametrize("as_json", [True, False])
def test_a_change_that_is_not_in_its_files_yet_is_reported(
    as_json: bool, scratch: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*arguments: object, **options: object) -> None:
        raise IoFailure("append to", "events.jsonl", OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))

    where = ["--repo", str(scratch), *(["--json"] if as_json else [])]
    assert entry.run(["issue", "init", *where]) == 0
    capsys.readouterr()
    with monkeypatch.context() as patches:
        patches.setattr(durable, "append_in", fail)
        assert entry.run(["issue", "create", "a title", *where]) == 0
    said = capsys.readouterr()
    (told,) = json.loads(said.out)["warnings"] if as_json else [said.err]
    assert "is committed, but not in all of its files yet: cannot append to events.jsonl: No space left" in told
    assert "the next command" in told
    assert entry.run(["issue", "list", *where]) == 0
    said = capsys.readouterr()
    assert ("a title" in said.out, "warnings" in said.out, said.err) == (True, False, "")


def test_the_envelope_of_a_failure_has_the_warnings_before_it(capsys: pytest.CaptureFixture[str]) -> None:
    output = Output(as_json=True)
    output.warning("the change is decided")
    output.failure(IoFailure("append to", "events.jsonl", OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))))
    said = json.loads(capsys.readouterr().out)
    assert (said["ok"], said["warnings"]) == (False, ["the change is decided"])
