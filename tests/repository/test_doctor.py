"""The doctor: a healthy repository has no findings; all damage is found, and repaired where that is safe."""

from __future__ import annotations

import os
import re
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.clock import format_instant
from holdfast.errors import LockConflict
from holdfast.findings import MAX_ROUNDS, Check, Finding, is_wrong, warning
from holdfast.fs import probe as probing
from holdfast.fs.directory import make_directories
from holdfast.locks.file_lock import FileLocker
from holdfast.repository import checks_leftovers, checks_storage, doctor, payloads
from holdfast.repository.checks import CHECKS
from holdfast.repository.context import WORKTREES
from holdfast.repository.doctor import Examination
from holdfast.repository.payloads import payload_locked
from holdfast.repository.repository import Repository
from tests.repository import damage
from tests.repository.kept import fingerprint, keep, require_whole
from tests.repository.repositories import add_worktree, make_repository

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="plants damage that needs POSIX")


@pytest.fixture
def repository(scratch: Path) -> Repository:
    made = make_repository(scratch / "repository")
    damage.prepare(made.context)
    return made


def codes(findings: list[Finding] | tuple[Finding, ...]) -> set[str]:
    return {each.code for each in findings}


def test_a_healthy_repository_has_no_findings_and_is_not_changed(repository: Repository) -> None:
    before = fingerprint(repository.root)
    assert repository.examine(strict=True) == []
    assert repository.repair(strict=True) == ((), (), ())
    assert fingerprint(repository.root) == before


@pytest.mark.sampled(21)
@pytest.mark.req("LC-28")
@pytest.mark.parametrize("name", damage.ALL)
def test_planted_damage_is_found_and_repaired_if_that_is_safe(repository: Repository, name: str) -> None:
    planted = damage.ALL[name]
    planted.plant(repository.context)
    before = fingerprint(repository.root)
    findings = repository.examine(strict=planted.strict)
    found = [each for each in findings if each.code == planted.code]
    assert found, codes(findings)
    assert codes(findings) == {planted.code, *planted.also}
    assert found[0].severity == planted.severity
    assert found[0].subject
    assert found[0].meaning
    assert (found[0].fix is not None) is planted.repaired
    assert found[0].remedy.startswith("nothing") is not planted.repaired
    without_locks = {each: what for each, what in fingerprint(repository.root).items() if "lock" not in each}
    assert without_locks == {each: what for each, what in before.items() if "lock" not in each}

    repaired = repository.repair(strict=planted.strict)
    assert repaired.failed == ()
    assert (planted.code in codes(repaired.fixed)) is planted.repaired
    assert (planted.code in codes(repaired.remaining)) is not planted.repaired
    if planted.repaired:
        assert repaired.remaining == ()
    once = fingerprint(repository.root)
    again = repository.repair(strict=planted.strict)
    assert again.fixed == ()
    assert again.remaining == repaired.remaining or not planted.repaired
    assert fingerprint(repository.root) == once


def test_every_check_has_damage_that_it_finds() -> None:
    """Four checks are tested separately: their findings cannot be planted in a directory."""
    made_here = {
        *("commits", "operations", "collections", "plans", "trees", "snapshots", "content", "heads"),
        *("parents", "references", "pins", "directories", "payloads", "records", "scratch", "remnants"),
        *("drafts", "leases", "waiters", "audit", "clock", "links", "permissions", "owners"),
    }
    assert {check.name for check in CHECKS} - made_here == {"format", "site", "filesystem", "disk"}
    assert len({check.name for check in CHECKS}) == len(CHECKS)


def test_every_code_is_documented_with_its_severity_and_whether_it_is_repaired() -> None:
    page = Path(__file__).parents[2] / "docs" / "reference" / "findings.md"
    table = [row for row in page.read_text().splitlines() if row.startswith("| `")]
    cells = [[cell.strip() for cell in row.split("|")[1:-1]] for row in table]
    rows = {cell[0].strip("`"): cell for cell in cells}
    source = "".join(path.read_text() for path in Path(doctor.__file__).parent.glob("checks*.py"))
    source += Path(doctor.__file__).read_text()
    codes_used = set(
        re.findall(r'(?:Finding\(|_dangling\(examination,|findings\.\w+\(|: \(|, \()\s*"([a-z]+-[a-z-]+)"', source)
    )
    assert rows.keys() == codes_used
    for planted in damage.ALL.values():
        _, severity, _, repair = rows[planted.code]
        assert severity == planted.severity
        assert repair.isascii() is planted.repaired or " if " in repair  # else a dash


def test_a_changed_file_is_found_only_by_reading_it(repository: Repository) -> None:
    damage.changed_file(repository.context)
    assert repository.examine() == []
    assert codes(repository.examine(strict=True)) == {"snapshot-damaged"}


def test_an_unsafe_filesystem_is_found(repository: Repository, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probing, "filesystem_kind", lambda path: "nfs4")
    assert codes(repository.examine()) == {"filesystem-unsafe"}
    monkeypatch.setattr(probing, "_excludes_processes", lambda path: False)
    assert codes(repository.examine(strict=True)) == {"filesystem-unsafe"}


def test_an_older_format_is_a_note(repository: Repository, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks_storage, "FORMAT_VERSION", 2)
    findings = repository.examine()
    assert codes(findings) == {"format-old"}
    assert not is_wrong(findings)


@pytest.mark.skipif(sys.platform == "win32" or os.geteuid() == 0, reason="root may write everywhere")
def test_a_directory_that_cannot_be_written_is_found(repository: Repository) -> None:
    place = repository.root / ".jvs" / "refs"
    place.chmod(0o500)
    try:
        assert codes(repository.examine()) == {"permissions-missing"}
    finally:
        place.chmod(0o700)


def test_a_user_cannot_write_to_a_directory_of_another_user() -> None:
    if sys.platform == "win32":
        raise NotImplementedError
    status = os.stat_result((0o040755, 0, 0, 1, 4_000_000, 4_000_000, 0, 0, 0, 0))
    assert checks_storage._can_write(status) is (os.geteuid() == 0)


# --- Work in progress is not damage -----------------------------------------------------------------


def test_a_scratch_in_use_is_left_alone(repository: Repository) -> None:
    context = repository.context
    with payloads.scratch(context, "snapshot") as room:
        room.tree.mkdir()
        assert repository.examine() == []
        assert repository.repair().fixed == ()
        assert room.tree.is_dir()


def test_a_scratch_that_is_about_to_be_locked_is_left_alone(
    repository: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lock file exists just before it is locked, and may be locked just after the doctor looked."""
    begun = repository.context.paths.scratch / ("b" * 16)
    begun.mkdir(parents=True)
    (begun / payloads.LOCK).touch()
    assert repository.examine() == []
    with payloads.scratch(repository.context, "test") as room:
        seen = payloads.AbandonedScratch(room.scratch_id, room.path, None)
        monkeypatch.setattr(payloads, "abandoned", lambda places: iter([seen]))
        assert repository.examine() == []


def test_a_scratch_that_a_pending_operation_needs_is_left_until_the_operation_ends(repository: Repository) -> None:
    context = repository.context
    damage.unfinished_operation(context)
    place = context.paths.scratch / "dead"  # the scratch of that operation
    make_directories(place / "payload")
    with payload_locked(context, "new"):
        assert repository.examine() == []  # another process is working on it
    assert codes(repository.examine()) == {"operation-unfinished"}
    assert "operation-unfinished" in codes(repository.repair().fixed)
    assert not place.exists()


def test_a_tree_that_is_being_published_is_left_alone(repository: Repository) -> None:
    context = repository.context
    with payloads.scratch(context, "snapshot", scratch_id="0123456789abcdef"):
        damage.unknown_tree(context)
        assert repository.examine() == []
    assert codes(repository.examine()) == {"tree-unknown"}


def test_a_quarantined_tree_is_intact_and_the_trail_says_where_it_is(repository: Repository) -> None:
    context = repository.context
    damage.unknown_tree(context)
    (context.paths.tree("0123456789abcdef") / "payload" / "file").write_text("precious")
    repository.repair()
    place = repository.root / ".jvs" / "quarantine" / "0123456789abcdef"
    assert (place / "payload" / "file").read_text() == "precious"
    last = list(context.store.entries(context.trail.stream))[-1].record
    assert (last.event, last.facts["moved_to"]) == ("tree_quarantined", str(place))


def test_snapshots_survive_the_loss_of_all_their_records(repository: Repository) -> None:
    for name in ("descriptors", "audit"):
        shutil.rmtree(repository.root / ".jvs" / name)
    trees = {path.name for path in repository.context.paths.snapshots.iterdir()}
    repository.repair()
    assert {path.name for path in (repository.root / ".jvs" / "quarantine").iterdir()} == trees


def test_a_running_collection_is_left_alone(repository: Repository) -> None:
    damage.undecided_collection(repository.context)
    guard = FileLocker().lock_exclusive(repository.context.paths.guards / "collector.lock")
    with guard:
        assert repository.examine() == []


def test_a_commit_in_progress_is_left_alone(repository: Repository) -> None:
    damage.unfinished_commit(repository.context)
    guard = FileLocker().lock_exclusive(repository.context.paths.guards / "retention.lock")
    with guard:
        assert "commit-unfinished" not in codes(repository.examine())


@pytest.mark.parametrize("name", [".a-0123456789ab.tmp", ".holdfast-probe-0123456789ab"])
def test_the_record_of_a_worktree_that_is_named_like_a_draft_is_left_alone(
    repository: Repository, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An earlier version allowed such names."""
    monkeypatch.setattr(payloads, "is_draft_name", lambda _: False, raising=False)
    repository.worktrees.create(name)
    record = repository.root / ".jvs" / "worktrees" / name
    os.utime(record, (0, 0))
    assert repository.repair().remaining == ()
    assert repository.worktrees.state(name).exists
    assert (record / "config.json").exists()


def test_a_young_draft_is_left_alone(repository: Repository) -> None:
    damage.old_draft(repository.context)
    (draft,) = (repository.root / ".jvs" / "refs").glob(".v2*")
    os.utime(draft, (time.time(), time.time() - checks_leftovers.DRAFT_AGE / 2))
    assert repository.examine() == []


def test_the_head_of_a_worktree_that_reuses_a_name_is_not_behind(repository: Repository) -> None:
    """Snapshots that were published under this name, on top of this head, belong to the removed worktree."""
    context = repository.context
    head = damage.head_of(context)
    add_worktree(context, "dev", head=head)
    keep(context, {"dev": "x"}, worktree="dev", head=False)
    assert codes(repository.examine()) == {"head-behind"}
    later = context.store.now() + 60
    damage.change(context, WORKTREES.key("dev"), created_at=format_instant(later))
    assert repository.examine() == []


# --- User data is never deleted ---------------------------------------------------------------------


def test_a_repair_leaves_unknown_directories_and_their_content(repository: Repository) -> None:
    context = repository.context
    damage.unknown_directory(context)
    damage.strange_snapshot_directory(context)
    (context.paths.snapshots / "backup").mkdir()
    (context.paths.snapshots / "notes.txt").write_text("precious")
    (context.paths.snapshots / ("f" * 16)).write_text("no directory")
    damage.lost_descriptor(context)
    trees = set(context.paths.snapshots.iterdir())
    repository.repair(strict=True)
    assert (context.paths.worktrees / "mine" / "work").read_text() == "precious"
    assert set(context.paths.snapshots.iterdir()) == trees


def test_a_repair_moves_the_head_to_the_published_snapshot(repository: Repository) -> None:
    context = repository.context
    extra = keep(context, {"extra": "x"}, head=False)
    repository.repair()
    assert damage.head_of(context) == extra
    require_whole(context)


def test_a_tree_does_not_count_as_unpublished_if_the_trail_was_tampered_with(repository: Repository) -> None:
    damage.lost_descriptor(repository.context)
    path = repository.root / ".jvs" / "audit" / "audit.jsonl"
    path.write_text("".join([*path.read_text().splitlines(keepends=True)[:-2], '{"forged": true}\n']))
    trees = set(repository.context.paths.snapshots.iterdir())
    repository.repair()
    assert set(repository.context.paths.snapshots.iterdir()) == trees


# --- The framework ----------------------------------------------------------------------------------


def failing(examination: Examination) -> Iterator[Finding]:
    raise LockConflict("busy")
    yield


def stubborn(examination: Examination) -> Iterator[Finding]:
    def fix() -> None:
        raise LockConflict("not now")

    yield warning("stubborn", "it", "it is", "it means", "try", fix)


def lasting(examination: Examination) -> Iterator[Finding]:
    yield warning("lasting", "it", "it is", "it means", "try", lambda: None)


def test_other_layers_can_add_checks_and_a_failing_check_stops_no_other(repository: Repository) -> None:
    checks = [Check("failing", failing), Check("stubborn", stubborn)]
    findings = doctor.examine(repository.context, checks)
    assert [each.code for each in findings] == ["check-failed", "stubborn"]
    repaired = doctor.repair(repository.context, checks)
    assert [each.code for each, _ in repaired.failed] == ["stubborn"]
    assert [each.code for each in repaired.remaining] == ["check-failed", "stubborn"]


def test_a_repair_that_does_not_help_is_not_repeated_forever(repository: Repository) -> None:
    repaired = doctor.repair(repository.context, [Check("lasting", lasting)])
    assert len(repaired.fixed) <= MAX_ROUNDS
    assert codes(repaired.remaining) == {"lasting"}


def test_an_unreadable_record_is_reported_once_and_blocks_repairs_that_depend_on_it(repository: Repository) -> None:
    head = damage.head_of(repository.context)
    (repository.root / ".jvs" / "descriptors" / f"{head}.json").write_text("{")
    damage.orphaned_tree(repository.context)
    repaired = repository.repair()
    assert [each.code for each in repaired.remaining].count("document-corrupt") == 1
    assert {path.name for path in repository.context.paths.snapshots.iterdir()} >= {head}


def test_a_finding_converts_to_a_record_for_programs(repository: Repository) -> None:
    damage.dangling_pin(repository.context)
    (finding,) = repository.examine()
    record = finding.as_record()
    assert record["code"] == "pin-dangling"
    assert record["severity"] == "warning"
    assert record["fixable"] is True
    assert record["facts"] == {"snapshot_id": "f" * 16}
