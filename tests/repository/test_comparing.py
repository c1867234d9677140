"""Status and diffs: changed files, and their changed lines."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from holdfast.errors import PartialSnapshot, UsageFailure
from holdfast.repository.compare import Comparison, compare, status
from holdfast.repository.context import MAIN, Proof, RepositoryContext
from holdfast.repository.patches import patches
from holdfast.repository.snapshots import SnapshotOptions, snapshot
from tests.repository.history_states import state_of
from tests.repository.interruptions import write
from tests.repository.repositories import make_repository

pytestmark = pytest.mark.both_homes


class Site:
    def __init__(self, root: Path) -> None:
        repository = make_repository(root)
        self.context: RepositoryContext = repository.context
        self.payload = self.context.paths.payload(MAIN)
        lease = repository.leases.acquire(MAIN, repository.leases.request(ttl=3600.0)).lease
        self.proof = Proof(lease.lock_id, lease.fencing_token)

    def take(self, tag: str) -> str:
        return snapshot(self.context, MAIN, self.proof, SnapshotOptions(tag=tag)).snapshot_id


@pytest.fixture
def site(scratch: Path) -> Site:
    return Site(scratch)


def changes_in(found: Comparison) -> set[tuple[str, str]]:
    return {(os.fsdecode(each.path), each.what) for each in found.changes}


def test_before_the_first_snapshot_everything_is_new(site: Site) -> None:
    assert status(site.context, MAIN).changes == ()
    write(site.payload, {"file": "1", "directory/below": "2"})
    found = status(site.context, MAIN)
    assert changes_in(found) == {("file", "added"), ("directory", "added"), ("directory/below", "added")}
    assert found.old.descriptor is None


def test_status_lists_the_changes_since_the_head(site: Site) -> None:
    write(site.payload, {"same": "1", "changed": "1", "gone": "1"})
    site.take("v1")
    assert status(site.context, MAIN).changes == ()
    write(site.payload, {"same": "1", "changed": "2", "new": "1"})
    os.utime(site.payload / "same", ns=(0, 0))
    found = {(os.fsdecode(each.path), each.what, each.aspects[:1]) for each in status(site.context, MAIN).changes}
    assert {each for each in found if each[0] != "same"} == {
        ("changed", "modified", ("content",)),
        ("gone", "removed", ()),
        ("new", "added", ()),
    }


def test_a_changed_directory_mtime_alone_is_not_a_change(site: Site) -> None:
    write(site.payload, {"file": "1"})
    site.take("v1")
    (site.payload / "passing").touch()
    (site.payload / "passing").unlink()
    assert status(site.context, MAIN).changes == ()


def test_two_snapshots_are_compared_in_the_given_order(site: Site) -> None:
    write(site.payload, {"a": "1"})
    site.take("v1")
    write(site.payload, {"b": "1"})
    site.take("v2")
    assert changes_in(compare(site.context, MAIN, "v1", "v2")) == {("a", "removed"), ("b", "added")}
    assert changes_in(compare(site.context, MAIN, "head", "head~1")) == {("a", "added"), ("b", "removed")}
    assert changes_in(compare(site.context, MAIN, "v1", None)) == {("a", "removed"), ("b", "added")}
    assert compare(site.context, MAIN, None, None).changes == ()
    assert compare(site.context, MAIN, "v1", "v1").changes == ()


@pytest.mark.req("LC-27")
def test_a_newer_snapshot_without_an_older_one_is_refused(site: Site) -> None:
    with pytest.raises(UsageFailure, match="needs the older snapshot"):
        compare(site.context, MAIN, None, site.take("v1"))


def test_a_partial_snapshot_is_not_compared(site: Site) -> None:
    (site.context.paths.tree(site.take("v1")) / ".READY").unlink()
    for old in ("v1", None):
        with pytest.raises(PartialSnapshot):
            compare(site.context, MAIN, old, None)


def test_a_patch_shows_the_lines_of_text(site: Site) -> None:
    write(site.payload, {"text": "one\ntwo\nthree\n", "gone": "bye\n"})
    (site.payload / "binary").write_bytes(b"\0\1\2")
    site.take("v1")
    write(site.payload, {"text": "one\n2\nthree\n", "new": "no end"})
    (site.payload / "binary").write_bytes(b"\0\1\3")
    found = {
        os.fsdecode(each.change.path): each for each in patches(site.context, compare(site.context, MAIN, None, None))
    }
    assert found["text"].lines == (
        "--- a/text",
        "+++ b/text",
        "@@ -1,3 +1,3 @@",
        " one",
        "-two",
        "+2",
        " three",
    )
    assert (found["text"].added, found["text"].removed) == (1, 1)
    assert found["binary"].lines is None
    assert found["gone"].lines == ("--- a/gone", "+++ /dev/null", "@@ -1 +0,0 @@", "-bye")
    assert found["new"].lines == (
        "--- /dev/null",
        "+++ b/new",
        "@@ -0,0 +1 @@",
        "+no end",
        "\\ No newline at end of file",
    )


@pytest.mark.skipif(sys.platform == "win32", reason="symbolic links need a privilege")
def test_a_patch_shows_the_target_of_a_symlink_and_does_not_follow_it(site: Site) -> None:
    (site.payload / "link").symlink_to("/etc/hostname")
    site.take("v1")
    (site.payload / "link").unlink()
    (site.payload / "link").symlink_to("elsewhere")
    (found,) = patches(site.context, compare(site.context, MAIN, None, None))
    assert found.lines is not None
    assert [each for each in found.lines if each[0] in "+-"][2:] == ["-/etc/hostname", "+elsewhere"]


@pytest.mark.skipif(sys.platform == "win32", reason="Windows does not allow newlines in names")
def test_a_newline_in_a_name_cannot_forge_lines(site: Site) -> None:
    site.take("v1")
    (site.payload / "a\n+++ forged").write_text("text\n")
    (found,) = patches(site.context, compare(site.context, MAIN, None, None))
    assert found.lines == ("--- /dev/null", "+++ b/a\\n+++ forged", "@@ -0,0 +1 @@", "+text")


def test_comparing_changes_nothing(site: Site) -> None:
    write(site.payload, {"a": "1"})
    site.take("v1")
    write(site.payload, {"b": "1"})
    before = state_of(site.context.paths.root)
    compare(site.context, MAIN, None, None)
    list(patches(site.context, compare(site.context, MAIN, "v1", None)))
    assert state_of(site.context.paths.root) == before
