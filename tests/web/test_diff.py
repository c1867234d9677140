"""The diff of large files and of many: bounded work, bounded pages."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.repository.init import initialise
from holdfast.repository.repository import Repository
from holdfast.web.contents import PAGES
from holdfast.web.layout import PageRequest
from holdfast.web.pages import diff
from holdfast.web.workspaces import Workspace, WorkspaceSettings, workspaces_of
from tests.repository.test_patches import Work, similar

FILES = 12


@pytest.fixture
def workspace(tmp_path: Path) -> Workspace:
    """A worktree in which each line of some large files has changed."""
    root = tmp_path / "fleet"
    initialise(root)
    with Repository(root) as repository, repository.lease("main", ttl=600.0) as held:
        for number in range(FILES):
            (repository.path("main") / f"{number}.py").write_text(similar(number))
        repository.snapshot("main", held)
        for number in range(FILES):
            (repository.path("main") / f"{number}.py").write_text(similar(number + 100))
    return workspaces_of([root], WorkspaceSettings("human:ada", None, tmp_path))[0]


def shown(workspace: Workspace) -> str:
    return str(PAGES["diff"](PageRequest(workspace, [workspace], {}, 0.0, writable=False)).body)


def test_the_work_for_a_page_is_bounded(workspace: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    work = Work(monkeypatch, diff.MOST_STEPS)
    text = shown(workspace)
    assert work.done <= diff.MOST_STEPS
    assert text.count('class="file"') == FILES
    assert text.count("<tr") <= FILES * (diff.MOST_LINES + 1)


def test_the_size_of_a_page_is_bounded(workspace: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    """What does not fit is still listed."""
    whole = shown(workspace)
    monkeypatch.setattr(diff, "MOST_SHOWN", 100_000)
    text = shown(workspace)
    assert len(text) < len(whole) / 4
    for number in range(FILES):
        assert f"{number}.py</code>" in text
    assert "more lines" in text
