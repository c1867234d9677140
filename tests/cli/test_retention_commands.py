"""The commands `ref`, `pin`, `gc`, `audit` and `doctor`."""

from __future__ import annotations

import json
import re
import signal
from pathlib import Path

import pytest

from holdfast.repository.context import DESCRIPTORS, RepositoryContext
from holdfast.repository.repository import Repository
from tests.cli.commands import Running, data, error, holdfast, wait_until
from tests.repository import damage
from tests.repository.kept import keep, line_of, snapshots_of
from tests.support.homes import make_repository

pytestmark = pytest.mark.both_homes


@pytest.fixture
def root(scratch: Path) -> Path:
    """A repository with three snapshots."""
    line_of(make_repository(scratch / "repository").context, 3)
    return scratch / "repository"


def ids(root: Path) -> list[str]:
    """The ids of the snapshots of main, newest first."""
    context = opened(root)
    found, head = snapshots_of(context), context.config("main").head_snapshot_id
    ordered: list[str] = []
    while head is not None:
        ordered.append(head)
        head = found[head].parent_id
    return ordered


def opened(root: Path) -> RepositoryContext:
    return Repository(root).context


def test_a_reference_is_created_listed_and_deleted(root: Path) -> None:
    head, before, _ = ids(root)
    assert holdfast("ref", "create", "v1", "head~1", "-m", "why", cwd=root).returncode == 0
    assert data(holdfast("ref", "create", "v2", head[:6], "--repo", root, "--json"))["snapshot_id"] == head
    listed = data(holdfast("ref", "list", "--json", cwd=root))["references"]
    assert [(each["name"], each["snapshot_id"], each["note"]) for each in listed] == [
        ("v1", before, "why"),
        ("v2", head, ""),
    ]
    again = holdfast("ref", "create", "v1", "v2", "--json", cwd=root)
    assert (again.returncode, error(again)["code"]) == (4, "E_ALREADY_EXISTS")
    assert holdfast("ref", "delete", "v1", cwd=root).returncode == 0
    assert holdfast("ref", "delete", "v1", cwd=root).returncode == 3
    assert "v2" in holdfast("ref", "list", cwd=root).stdout


def test_a_pin_is_added_listed_and_removed(root: Path) -> None:
    made = data(holdfast("pin", "add", "head", "--reason", "look", "--keep-for", "30d", "--json", cwd=root))
    assert made["until"] > made["created_at"]
    (listed,) = data(holdfast("pin", "list", "--json", cwd=root))["pins"]
    assert (listed["pin_id"], listed["reason"], listed["holds"]) == (made["pin_id"], "look", True)
    assert made["pin_id"] in holdfast("pin", "list", cwd=root).stdout
    assert holdfast("pin", "remove", made["pin_id"], cwd=root).returncode == 0
    assert holdfast("pin", "list", cwd=root).stdout == "There are no pins.\n"


def test_the_policy_is_shown_and_its_parts_are_set_separately(root: Path) -> None:
    assert "no policy" in holdfast("gc", "policy", cwd=root).stdout
    shown = data(holdfast("gc", "policy", "--keep-last", "2", "--dry-run", "--json", cwd=root))
    assert (shown["policy"]["keep_last"], shown["changed"]) == (2, True)
    assert "no policy" in holdfast("gc", "policy", cwd=root).stdout
    holdfast("gc", "policy", "--keep-last", "2", "--max-bytes", "1.5G", cwd=root)
    holdfast("gc", "policy", "--keep-for", "14d", "--keep-last", "none", cwd=root)
    policy = data(holdfast("gc", "policy", "--json", cwd=root))["policy"]
    assert policy == {"keep_last": None, "keep_for": 14 * 86400.0, "max_bytes": 3 << 29}
    wrong = holdfast("gc", "policy", "--keep-last", "0", "--json", cwd=root)
    assert (wrong.returncode, error(wrong)["code"]) == (2, "E_SETTING_INVALID")
    assert holdfast("gc", "policy", "--max-bytes", "much", cwd=root).returncode == 2


def test_a_plan_is_shown_and_run(root: Path) -> None:
    head, *older = ids(root)
    holdfast("gc", "policy", "--keep-last", "1", cwd=root)
    told = holdfast("gc", "plan", cwd=root).stdout
    assert all(each in told for each in (head, *older))
    match = re.search(r"gc run --plan (\w+)", told)
    assert match is not None
    plan = match[1]
    dry = data(holdfast("gc", "run", "--plan", plan, "--dry-run", "--json", cwd=root))
    assert (dry["deleted"], dry["state"], set(dry["snapshots"])) == (0, "proposed", set(older))
    done = data(holdfast("gc", "run", "--plan", plan, "--json", cwd=root))
    assert (done["deleted"], done["state"]) == (2, "finished")
    assert ids(root) == [head]
    again = data(holdfast("gc", "run", "--plan", plan, "--json", cwd=root))
    assert (again["deleted"], again["state"]) == (0, "finished")
    assert "nothing to delete" in holdfast("gc", "plan", cwd=root).stdout


def test_an_outdated_plan_is_refused_with_its_code(root: Path) -> None:
    holdfast("gc", "policy", "--keep-last", "1", cwd=root)
    plan = data(holdfast("gc", "plan", "--json", cwd=root))["plan"]
    holdfast("ref", "create", "late", "head~2", cwd=root)
    result = holdfast("gc", "run", "--plan", plan, "--json", cwd=root)
    assert result.returncode == 4
    failure = error(result)
    assert failure["code"] == "E_GC_PLAN_MISMATCH"
    assert failure["changed"][0]["why"] == ["reference late"]
    assert len(ids(root)) == 3
    assert holdfast("gc", "run", "--plan", "none", cwd=root).returncode == 3


def test_the_audit_trail_is_shown_verified_and_limited(root: Path) -> None:
    told = data(holdfast("audit", "--verify", "--json", cwd=root))
    assert (told["verified"], told["count"], len(told["entries"])) == (True, 4, 4)
    assert told["last_hash"] == told["entries"][-1]["hash"]
    limited = data(holdfast("audit", "--limit", "1", "--json", cwd=root))
    assert [each["number"] for each in limited["entries"]] == [4]
    assert data(holdfast("audit", "--since", "1h", "--json", cwd=root))["count"] == 4
    assert data(holdfast("audit", "--since", "2100-01-01T00:00:00Z", "--json", cwd=root))["entries"] == []
    assert holdfast("audit", "--since", "yesterday", cwd=root).returncode == 2
    assert "The chain is intact: 4 entries" in holdfast("audit", "--verify", cwd=root).stdout


def test_a_broken_chain_is_reported_with_its_code_and_position(root: Path) -> None:
    damage.forged_entry(opened(root))
    result = holdfast("audit", "--verify", "--json", cwd=root)
    assert result.returncode == 6
    assert error(result)["code"] == "E_AUDIT_CHAIN_BROKEN"
    assert error(result)["number"] == 2
    assert holdfast("audit", cwd=root).returncode == 0  # it can still be read


def test_the_audit_trail_is_followed_line_by_line_through_a_pipe(root: Path) -> None:
    context = opened(root)
    with Running("audit", "--follow", "--verify", "--json", "--repo", root) as following:
        lines = [json.loads(following.hear()) for _ in range(4)]
        assert [each["data"]["entry"]["number"] for each in lines] == [1, 2, 3, 4]
        keep(context, {"new": "file"})
        line = json.loads(following.hear())
        assert line["data"]["entry"]["event"] == "snapshot_published"
        following.send(signal.SIGINT)
        assert following.finish().returncode == 130


def test_following_ends_when_the_reader_closes_the_pipe(root: Path) -> None:
    context = opened(root)
    with Running("audit", "--follow", "--repo", root) as following:
        assert following.hear()
        assert following.process.stdout is not None
        following.process.stdout.close()
        keep(context, {"new": "file"})
        wait_until(lambda: following.process.poll() is not None)


def test_a_sound_repository_is_healthy(root: Path) -> None:
    result = holdfast("doctor", "--strict", cwd=root)
    assert (result.returncode, result.stdout) == (0, "The repository is healthy.\n")
    assert data(holdfast("doctor", "--json", cwd=root)) == {"healthy": True, "findings": [], "server": None}


@pytest.mark.req("LC-28")
def test_the_doctor_reports_problems_and_repairs_them_on_request(root: Path) -> None:
    context = opened(root)
    damage.abandoned_scratch(context)
    damage.orphaned_tree(context)
    told = holdfast("doctor", "--strict", "--json", cwd=root)
    assert told.returncode == 6
    failure = error(told)
    assert failure["code"] == "E_UNHEALTHY"
    assert {each["code"] for each in failure["findings"]} == {"scratch-abandoned", "tree-orphaned"}
    assert all(each["fixable"] and each["remedy"] == "remove it" for each in failure["findings"])
    assert (context.paths.scratch / "left").is_dir()  # the check changes nothing
    read = holdfast("doctor", cwd=root)
    assert "scratch-abandoned" in read.stdout
    assert "--fix: remove it" in read.stdout
    assert "2 warnings" in read.stderr
    fixed = data(holdfast("doctor", "--strict", "--fix", "--json", cwd=root))
    assert {each["code"] for each in fixed["fixed"]} == {"scratch-abandoned", "tree-orphaned"}
    assert fixed["findings"] == fixed["failed"] == []
    assert data(holdfast("doctor", "--strict", "--fix", "--json", cwd=root))["fixed"] == []


def test_the_doctor_reports_problems_that_it_cannot_repair(root: Path) -> None:
    context = opened(root)
    damage.head_missing(context)
    result = holdfast("doctor", "--fix", cwd=root)
    assert result.returncode == 6
    assert "head-missing" in result.stdout
    assert context.store.read(DESCRIPTORS.key("f" * 16)) is None


def test_a_repository_with_only_notes_is_healthy(root: Path) -> None:
    damage.expired_lease(opened(root))
    result = holdfast("doctor", "--json", cwd=root)
    assert result.returncode == 0
    assert [each["severity"] for each in data(result)["findings"]] == ["note"]
