"""Reading files that another machine replaces or removes while they are open, as on network filesystems."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from holdfast.errors import IoFailure, NotFound
from holdfast.fs import calls, durable
from holdfast.fs.directory import Directory


def fail_reads(monkeypatch: pytest.MonkeyPatch, code: int, times: int, meanwhile: Path | None = None) -> None:
    """Make this many reads fail; the file at `meanwhile` is removed before the first failure."""
    left = [times]
    original = calls.read

    def read(descriptor: int, length: int) -> bytes:
        if left[0]:
            left[0] -= 1
            if meanwhile is not None:
                meanwhile.unlink(missing_ok=True)
            raise OSError(code, os.strerror(code))
        return original(descriptor, length)

    monkeypatch.setattr(calls, "read", read)


@pytest.mark.parametrize("code", [errno.ENOENT, errno.ESTALE, errno.EBADF])
def test_a_file_replaced_while_open_is_looked_up_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    (tmp_path / "file").write_bytes(b"new")
    fail_reads(monkeypatch, code, 2)

    assert durable.read(tmp_path / "file") == b"new"


@pytest.mark.parametrize("code", [errno.ENOENT, errno.ESTALE, errno.EBADF])
def test_lines_of_a_file_that_vanishes_while_open_are_looked_up_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    (tmp_path / "lines").write_bytes(b"one\ntwo\nto")
    with Directory.open(tmp_path) as directory:
        fail_reads(monkeypatch, code, 2)
        assert durable.read_lines_in(directory, "lines", after=4) == b"two\n"
        fail_reads(monkeypatch, code, 2)
        assert durable.end_of_lines_in(directory, "lines") == (8, b"")


def test_a_file_removed_while_open_is_not_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_bytes(b"old")
    fail_reads(monkeypatch, errno.ENOENT, 1, tmp_path / "file")

    with pytest.raises(NotFound):
        durable.read(tmp_path / "file")


def test_a_file_that_keeps_vanishing_is_an_io_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not `NotFound`: the file existed at every attempt."""
    (tmp_path / "file").write_bytes(b"never")
    fail_reads(monkeypatch, errno.ENOENT, 1 << 30)

    with pytest.raises(IoFailure):
        durable.read(tmp_path / "file")
