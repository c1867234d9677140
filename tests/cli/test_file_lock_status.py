"""`holdfast lock status` shows a file lock and changes nothing."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from holdfast.cli import lock
from holdfast.cli.lock import file_lock_state
from tests.cli.commands import FileLockHeld, data, error, holdfast

needs_proc_locks = pytest.mark.skipif(not Path("/proc/locks").exists(), reason="only Linux shows the holders")


def test_a_lock_that_was_never_taken_is_free_and_is_not_created(tmp_path: Path) -> None:
    result = holdfast("lock", "status", tmp_path / "a.lock", "--json")

    assert result.returncode == 0
    assert data(result)["state"] == "free"
    assert data(result)["exists"] is False
    assert list(tmp_path.iterdir()) == []


def test_a_lock_that_nobody_holds_is_free(tmp_path: Path) -> None:
    (tmp_path / "a.lock").touch()
    result = holdfast("lock", "status", tmp_path / "a.lock")

    assert result.stdout == f"{tmp_path / 'a.lock'}: free\n"


@needs_proc_locks
@pytest.mark.parametrize(("options", "state"), [([], "exclusive"), (["--shared"], "shared")])
def test_the_holder_and_its_mode_are_shown(tmp_path: Path, options: list[str], state: str) -> None:
    with FileLockHeld(tmp_path / "a.lock", *options, as_child=True) as holder:
        shown = data(holdfast("lock", "status", tmp_path / "a.lock", "--json"))
        text = holdfast("lock", "status", tmp_path / "a.lock").stdout

    assert (shown["state"], shown["holders_known"]) == (state, True)
    assert [each["pid"] for each in shown["holders"]] == [holder.pid]
    assert "lock run" in shown["holders"][0]["command"]
    assert f"held by  pid {holder.pid} (" in text
    assert re.search(r"started (just now|\S+ ago)", text)


@pytest.mark.parametrize(("options", "state"), [([], "exclusive"), (["--shared"], "shared")])
def test_where_the_system_does_not_show_holders_the_lock_is_probed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: list[str], state: str
) -> None:
    monkeypatch.setattr(lock, "find_holders", lambda path: None)
    with FileLockHeld(tmp_path / "a.lock", *options):
        held = file_lock_state(str(tmp_path / "a.lock"))
    free = file_lock_state(str(tmp_path / "a.lock"))

    assert (held.state, held.holders, held.holders_known) == (state, [], False)
    assert "the holder is not visible from here" in next(held.lines())
    assert free.state == "free"


def test_a_symbolic_link_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.lock").symlink_to(tmp_path / "elsewhere")
    result = holdfast("lock", "status", tmp_path / "a.lock", "--json")

    assert result.returncode == 7
    assert error(result)["code"] == "E_PATH_ESCAPE"
