"""The command `holdfast export`."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.cli.commands import error
from tests.cli.test_snapshots import call, root, run

__all__ = ["root"]


def test_a_snapshot_is_exported_as_a_plain_directory(root: Path, tmp_path: Path) -> None:
    (root / "main" / "d").mkdir()
    (root / "main" / "d" / "x").write_text("x\n")
    (root / "main" / "d" / "link").symlink_to("x")
    os.chmod(root / "main" / "d" / "x", 0o640)
    first = run(root, "snapshot")["snapshot_id"]
    (root / "main" / "file").write_text("later\n")
    run(root, "snapshot")
    told = run(root, "export", "head~1", str(tmp_path / "out"))

    assert told["snapshot_id"] == first
    assert told["files"] == 3
    assert told["directory"] == str(tmp_path / "out")
    assert (tmp_path / "out" / "file").read_text() == "one\n"
    assert (tmp_path / "out" / "d" / "x").read_text() == "x\n"
    assert os.readlink(tmp_path / "out" / "d" / "link") == "x"
    assert (tmp_path / "out" / "d" / "x").stat().st_mode & 0o777 == 0o640
    (tmp_path / "out" / "d" / "x").write_text("mine now")
    assert run(root, "verify", "--all")["verified"]


def test_a_single_file_or_directory_can_be_exported(root: Path, tmp_path: Path) -> None:
    (root / "main" / "d" / "e").mkdir(parents=True)
    (root / "main" / "d" / "e" / "x").write_text("x\n")
    run(root, "snapshot")
    run(root, "snapshot")
    run(root, "export", "head", str(tmp_path / "x"), "--path", "d/e/x")
    run(root, "export", "head", str(tmp_path / "d"), "--path", "d/")
    assert (tmp_path / "x").read_text() == "x\n"
    assert (tmp_path / "d" / "e" / "x").read_text() == "x\n"
    assert call(root, "export", "head", str(tmp_path / "y"), "--path", "d/e/x").stdout.endswith("1 file, 2 B.\n")


@pytest.mark.parametrize(
    ("place", "code"),
    [
        ("there", "E_ALREADY_EXISTS"),
        ("dangling", "E_ALREADY_EXISTS"),
        ("no/where", "E_NOT_FOUND"),
        ("repository/.jvs/x", "E_REFUSED"),
        ("repository/.jvs/snapshots/x", "E_REFUSED"),
        ("led-there/x", "E_REFUSED"),
    ],
)
def test_an_invalid_destination_is_refused_and_nothing_is_written(root: Path, place: str, code: str) -> None:
    run(root, "snapshot")
    top = root.parent
    (top / "there").mkdir()
    (top / "dangling").symlink_to("nowhere")
    (top / "led-there").symlink_to(root / ".jvs" / "snapshots")
    before = sorted(top.iterdir())
    assert error(call(root, "export", "head", str(top / place), "--json"))["code"] == code
    assert sorted(top.iterdir()) == before
    assert list((top / "there").iterdir()) == []


def test_a_path_missing_from_the_snapshot_is_an_error_and_nothing_is_written(root: Path, tmp_path: Path) -> None:
    run(root, "snapshot")
    result = call(root, "export", "head", str(tmp_path / "out"), "--path", "nothing", "--json")
    assert error(result)["code"] == "E_NOT_FOUND"
    assert list(tmp_path.iterdir()) == []


def test_a_damaged_snapshot_is_not_exported_in_part(root: Path, tmp_path: Path) -> None:
    snapshot = run(root, "snapshot")["snapshot_id"]
    (root / ".jvs" / "snapshots" / snapshot / "payload" / "file").unlink()
    result = call(root, "export", "head", str(tmp_path / "out"), "--json")
    assert error(result)["code"] == "E_CORRUPT"
    assert list(tmp_path.iterdir()) == []
