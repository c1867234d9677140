"""Hostile text in any record stays text on every page that shows it."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.web.contents import PAGES, PARTS
from holdfast.web.export import export_pages
from holdfast.web.workspaces import WorkspaceSettings, workspaces_of
from tests.web.hostile import HOSTILE, Markup, hostile_repository
from tests.web.served import Client, serving

TEXTLESS = {"new", "doctor", "audit-check"}  # pages and parts that show no text of others
WITH_SCRIPT = "issue prompt board graph names worktrees worktree diff landing batches run run-log ledger audit".split()


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """A repository, and the pages and parts that show its hostile texts."""
    checkout = tmp_path_factory.mktemp("hostile") / "repo"
    return checkout / ".git/holdfast", hostile_repository(checkout)


def test_hostile_records_stay_text_in_every_page_and_part(place: tuple[Path, list[str]], tmp_path: Path) -> None:
    root, pages = place
    names = [each.partition("/")[0].partition("?")[0] for each in pages]
    assert set(names) == {*PAGES, *PARTS} - TEXTLESS
    with_script = set()
    with serving([root], tmp_path / "data") as server:
        client = Client(server)
        for name, page in zip(names, pages, strict=True):
            answer = client.get(f"/r/repo/{page}")
            assert answer.status == 200, (page, answer.text[:500])
            found = Markup(answer.text)
            assert not found.suspicious, page
            assert all(source and source.startswith("/static/") for source in found.scripts), page
            assert not {"\x1b", "\x07", "\u202e", "\u2066"} & set(answer.text), page
            if "&lt;script&gt;alert(" in answer.text:
                with_script.add(name)
        for text in HOSTILE[:5]:
            assert client.get(f"/r/repo/board?q={''.join(f'%{byte:02x}' for byte in text.encode())}").status == 200
    assert with_script >= set(WITH_SCRIPT), "they show it"


def test_hostile_records_stay_text_in_a_file(place: tuple[Path, list[str]], tmp_path: Path) -> None:
    export_pages(workspaces_of([place[0]], WorkspaceSettings("human:ada", None, tmp_path)), tmp_path / "all.html")
    found = Markup((tmp_path / "all.html").read_text())
    assert found.scripts == []
    assert found.suspicious == ["style"], "our own"


@pytest.mark.parametrize("text", HOSTILE[:3])
def test_text_that_is_not_escaped_is_found(text: str) -> None:
    found = Markup(f'<p title="{text}">{text}</p>')
    assert found.scripts or found.suspicious
