"""Conflicts of worktrees are found before anybody merges, uncommitted work included, and nothing is changed."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from holdfast.errors import NotFound, Refused
from holdfast.fs import durable
from holdfast.git.current import read_again
from holdfast.git.pairs import Touched, merge_bases
from holdfast.git.program import Git
from holdfast.repository import git_init
from holdfast.repository.conflict_cache import CONFLICTS, ConflictCache
from holdfast.repository.conflicts import ConflictReport, find_conflicts
from holdfast.repository.git_init import adopt_checkout
from holdfast.repository.repository import Repository
from proof.effort import SEED, rounds
from tests.cli.commands import data, error, holdfast, python
from tests.git.conftest import commit_all, new_repository, write
from tests.support.homes import SAFE, copied, git, make_repository

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="paths of POSIX")

LINES = "".join(f"line {number}\n" for number in range(30))


def _make_project(top: Path) -> None:
    new_repository(top)
    for path in ("a", "b", "deep/er/c", "deep/d"):
        write(top / path, LINES)
    write(top / ".gitignore", "*.log\n")
    commit_all(top)


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Repository:
    """A checkout on `trunk` with the linked worktrees `one`, `two` and `three`."""
    monkeypatch.setattr(git_init, "require_safe", lambda directory, records_elsewhere: SAFE)
    top = copied(_make_project, tmp_path / "project")
    adopt_checkout(top)
    repository = Repository(top)
    for name in ("one", "two", "three"):
        repository.worktrees.create(name)
    return repository


def change(repository: Repository, worktree: str, path: str, text: str, line: int = 3) -> Path:
    """Change a line of a file of a worktree, or create the file."""
    place = repository.payload(worktree) / path
    lines = place.read_text().splitlines(keepends=True) if place.exists() else [""] * (line + 1)
    lines[line] = f"{text}\n"
    return write(place, "".join(lines))


def found(report: ConflictReport) -> dict[tuple[str, str], tuple[str, ...]]:
    return {(each.worktree, each.other): each.paths for each in report.conflicts}


def everything(repository: Repository) -> object:
    """The files of git and of all worktrees, apart from our own."""
    top = repository.payload()
    places = [top, *(repository.payload(each) for each in ("one", "two", "three"))]
    files = {
        os.path.join(at, name): (os.stat(os.path.join(at, name)).st_mtime_ns, os.stat(os.path.join(at, name)).st_size)
        for place in places
        for at, _, names in os.walk(place)
        for name in names
        if "/holdfast/" not in f"{at}/"
    }
    return files, git("for-each-ref", at=top), [git("--no-optional-locks", "status", "-s", at=each) for each in places]


def test_uncommitted_committed_and_new_files_conflict_and_nothing_is_changed(repository: Repository) -> None:
    change(repository, "one", "a", "of one")
    change(repository, "two", "a", "of two")
    commit_all(repository.payload("two"))
    write(repository.payload("one") / "new", "of one\n")
    write(repository.payload("three") / "new", "of three\n")
    write(repository.payload("three") / "a.log", "ignored\n")
    change(repository, "three", "b", "nobody else")
    before = everything(repository)

    report = find_conflicts(repository)

    assert found(report) == {("one", "two"): ("a",), ("one", "three"): ("new",)}
    assert report.target == "trunk"
    assert report.worktrees == ("main", "one", "three", "two")
    assert everything(repository) == before
    assert list(repository.context.paths.scratch.iterdir()) == []


def test_a_worktree_conflicts_with_what_has_landed_and_with_uncommitted_work_in_main(repository: Repository) -> None:
    change(repository, "one", "a", "of one")
    change(repository, "two", "b", "of two")
    change(repository, "main", "a", "landed")
    commit_all(repository.payload())
    change(repository, "main", "b", "not committed")

    report = find_conflicts(repository)

    assert found(report) == {("one", "trunk"): ("a",), ("main", "two"): ("b",)}
    assert [each.with_target for each in report.conflicts] == [True, False]
    assert [each.other for each in report.of("two")] == ["main"]
    assert find_conflicts(repository, into="hf/three").target == "hf/three"
    with pytest.raises(NotFound):
        find_conflicts(repository, into="nothing")
    with pytest.raises(NotFound):
        find_conflicts(repository, only="nothing")


def test_a_worktree_that_is_behind_does_not_conflict_with_those_that_follow_the_branch(repository: Repository) -> None:
    change(repository, "one", "a", "of one")
    change(repository, "main", "a", "landed")
    change(repository, "main", "b", "landed")
    commit_all(repository.payload())
    for name in ("later", "another"):
        repository.worktrees.create(name)
    change(repository, "later", "deep/d", "of later")
    change(repository, "another", "a", "of another, on top of what landed")

    assert found(find_conflicts(repository)) == {("one", "trunk"): ("a",), ("another", "one"): ("a",)}
    assert find_conflicts(repository, only="later").conflicts == ()
    assert found(find_conflicts(repository, only="another")) == {("another", "one"): ("a",)}

    change(repository, "one", "b", "of one too")
    change(repository, "later", "b", "of later")
    assert found(find_conflicts(repository, only="later")) == {("later", "one"): ("a", "b")}


def remove_and_change(repository: Repository) -> None:
    (repository.payload("one") / "a").unlink()
    change(repository, "two", "a", "changed")


def rename_two_ways(repository: Repository) -> None:
    for name in ("one", "two"):
        (repository.payload(name) / "a").rename(repository.payload(name) / f"a-{name}")


def file_and_directory(repository: Repository) -> None:
    write(repository.payload("one") / "place", "a file\n")
    write(repository.payload("two") / "place/file", "a file\n")


def binary(repository: Repository) -> None:
    for name in ("one", "two"):
        write(repository.payload(name) / "a", bytes(100) + name.encode())


def mode_of_new_file(repository: Repository) -> None:
    for name, mode in {"one": 0o644, "two": 0o755}.items():
        write(repository.payload(name) / "script", "#!/bin/sh\n").chmod(mode)


def directory_renamed_and_file_added_in_it(repository: Repository) -> None:
    (repository.payload("one") / "deep").rename(repository.payload("one") / "elsewhere")
    write(repository.payload("two") / "deep/new", "new\n")


def submodule(repository: Repository) -> None:
    for name in ("one", "two"):
        module = new_repository(repository.payload(name) / "module")
        write(module / "file", name)
        commit_all(module)


KINDS = [
    remove_and_change,
    rename_two_ways,
    file_and_directory,
    binary,
    mode_of_new_file,
    directory_renamed_and_file_added_in_it,
    submodule,
]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", KINDS, ids=lambda each: each.__name__)
def test_every_kind_of_conflict_of_uncommitted_work_is_found(
    repository: Repository, kind: Callable[[Repository], None]
) -> None:
    kind(repository)

    assert list(found(find_conflicts(repository))) == [("one", "two")]


def test_a_recorded_resolution_ends_a_conflict_that_was_known(repository: Repository) -> None:
    for name in ("one", "two"):
        change(repository, name, "a", name)
        commit_all(repository.payload(name))
    assert found(find_conflicts(repository)) == {("one", "two"): ("a",)}

    here = repository.payload("one")
    git("config", "rerere.enabled", "true", at=here)
    with pytest.raises(AssertionError, match="git"):
        git("merge", "-q", "hf/two", at=here)
    write(here / "a", LINES)
    git("rerere", at=here)
    git("merge", "--abort", at=here)

    assert found(find_conflicts(repository)) == {}


# --- The cache ------------------------------------------------------------------------------------------


def test_a_second_search_merges_only_what_has_changed(repository: Repository) -> None:
    for name in ("one", "two", "three"):
        change(repository, name, "a", name)
    first = find_conflicts(repository)
    assert (first.merges, len(first.conflicts)) == (3, 3)

    second = find_conflicts(repository)
    assert second == first._replace(merges=0)

    change(repository, "two", "b", "more of two")
    third = find_conflicts(repository)
    assert (third.merges, third.conflicts) == (2, first.conflicts)  # with one and three, whose objects are made again
    assert find_conflicts(repository, only="one").merges == 0

    (repository.payload("two") / "a").write_text(LINES)
    assert found(find_conflicts(repository)) == {("one", "three"): ("a",)}


def test_a_change_that_keeps_size_and_time_of_a_file_is_noticed(repository: Repository) -> None:
    place = change(repository, "one", "a", "one")
    change(repository, "two", "a", "two")
    assert found(find_conflicts(repository)) == {("one", "two"): ("a",)}
    status = place.stat()

    place.write_text(place.read_text().replace("one\n", "two\n"))
    os.utime(place, ns=(status.st_atime_ns, status.st_mtime_ns))

    assert found(find_conflicts(repository)) == {}  # both have made the same change


def test_a_cache_that_is_deleted_damaged_or_planted_costs_only_time(repository: Repository) -> None:
    change(repository, "one", "a", "one")
    change(repository, "two", "a", "two")
    expected = find_conflicts(repository)
    caches = repository.context.paths.caches
    content = json.loads((caches / CONFLICTS).read_bytes())
    planted = [
        b"",
        b"{}",
        b"[" * 10_000,
        json.dumps({**content, "schema_version": 2}).encode(),
        json.dumps({**content, "trees": dict.fromkeys(content["trees"], "--upload-pack=touch planted")}).encode(),
        json.dumps(
            {**content, "trees": dict.fromkeys(content["trees"], "1" * 40), "merges": {}, "changes": {}}
        ).encode(),
        json.dumps({**content, "merges": {key: [["\ud800"], ["\u4e00"]] for key in content["merges"]}}).encode(),
        json.dumps({**content, "changes": {key: {"\u4e00": "A"} for key in content["changes"]}, "merges": {}}).encode(),
    ]
    for each in planted:
        durable.replace(caches / CONFLICTS, each)
        assert find_conflicts(repository).conflicts == expected.conflicts
    for path in caches.glob("*.sums"):
        path.write_text(path.read_text().replace('"tree":"', '"tree":"--help '))
    durable.remove(caches / CONFLICTS)
    assert find_conflicts(repository).conflicts == expected.conflicts
    for path in caches.iterdir():
        path.write_bytes(b"damaged")
    assert find_conflicts(repository).conflicts == expected.conflicts
    shutil.rmtree(caches)
    assert find_conflicts(repository) == expected


def test_the_cache_is_bounded_and_forgets_what_was_not_used_for_longest(tmp_path: Path) -> None:
    cache = ConflictCache.read(tmp_path)
    for number in range(5000):
        cache.put_merged(f"{number}", ((), ()))
    cache.put_changes(("a", "b"), {b"%d" % number: "A" for number in range(3000)})
    assert cache.merged("0") is not None
    (tmp_path / "gone.look").touch()
    (tmp_path / "kept.look.sums").touch()
    (tmp_path / "main.stat").touch()
    cache.save({"kept.look"})

    again = ConflictCache.read(tmp_path)

    assert (again.merged("0"), again.merged("1"), again.changes(("a", "b"))) == (((), ()), None, None)
    assert sorted(os.listdir(tmp_path)) == [CONFLICTS, "kept.look.sums", "main.stat"]


def test_names_of_any_bytes_survive_the_cache(repository: Repository) -> None:
    name = os.fsdecode(b"odd \xff\nname")
    for worktree in ("one", "two"):
        write(repository.payload(worktree) / name, worktree)

    for _ in range(2):
        assert found(find_conflicts(repository)) == {("one", "two"): (name,)}


# --- What is left out -----------------------------------------------------------------------------------


def test_a_worktree_that_cannot_be_read_is_left_out_with_a_reason(repository: Repository) -> None:
    change(repository, "one", "a", "one")
    shutil.rmtree(repository.payload("two"))
    git("checkout", "-q", "--orphan", "empty", at=repository.payload("three"))

    report = find_conflicts(repository)

    assert {each.worktree: each.reason for each in report.skipped} == {
        "two": "its directory is gone",
        "three": "it has no commit yet",
    }


def test_two_that_have_no_common_ancestor_conflict(repository: Repository) -> None:
    here = repository.payload("three")
    git("checkout", "-q", "--orphan", "other", at=here)
    commit_all(here, "another root")

    report = find_conflicts(repository, only="three")

    assert found(report) == {("three", "trunk"): (), ("main", "three"): (), ("one", "three"): (), ("three", "two"): ()}
    assert report.conflicts[0].messages == ("they have no common ancestor",)


def test_files_that_change_between_the_look_and_the_merge_are_looked_at_again(
    repository: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    change(repository, "one", "a", "one")
    change(repository, "two", "a", "two")
    find_conflicts(repository)
    change(repository, "three", "a", "three")
    read, changes = read_again, iter(["while it was read"])

    def changing(*arguments: object) -> str:
        for text in changes:
            change(repository, "one", "b", text)
        return read(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr("holdfast.repository.conflicts.read_again", changing)

    assert set(found(find_conflicts(repository))) == {("one", "two"), ("one", "three"), ("three", "two")}


def test_a_plain_home_has_no_merges(tmp_path: Path) -> None:
    plain = make_repository(tmp_path / "plain")

    with pytest.raises(Refused, match="not a git checkout"):
        find_conflicts(plain)
    assert error(holdfast("conflicts", "--json", cwd=tmp_path / "plain"))["code"] == "E_REFUSED"
    assert holdfast("who", cwd=tmp_path / "plain").stdout == "Nobody holds anything.\n"


# --- Merge bases and changes that cannot meet -----------------------------------------------------------


def test_merge_bases_of_random_histories_are_those_of_git(tmp_path: Path) -> None:
    import random

    random_ = random.Random(SEED)
    top = new_repository(tmp_path / "random")
    tree = git("write-tree", at=top)
    for _ in range(rounds(20)):
        commits: list[str] = []
        for number in range(14):
            parents = random_.sample(commits, min(len(commits), random_.choice([0, 1, 1, 1, 2, 2, 3])))
            options = [word for parent in parents for word in ("-p", parent)]
            commits.append(git("commit-tree", tree, *options, "-m", f"{number} {random_.random()}", at=top))
        heads = random_.sample(commits, 4)
        found_here = merge_bases(Git(top / ".git"), heads)
        assert found_here is not None
        for (one, other), bases in found_here.items():
            try:
                expected = git("merge-base", "--all", one, other, at=top).split()
            except AssertionError:
                expected = []
            assert sorted(bases) == sorted(expected)


@pytest.mark.parametrize(
    ("one", "other", "meet"),
    [
        ({b"a": "M"}, {b"b": "M"}, False),
        ({b"a": "M"}, {b"a": "D"}, True),
        ({b"d": "A"}, {b"d/x/y": "A"}, True),
        ({b"d/x": "D", b"e/x": "A"}, {b"d/new": "A"}, True),
        ({b"d/x": "D", b"e/x": "A"}, {b"d/y": "M"}, False),
        ({b"d/x": "M"}, {b"d/new": "A"}, False),
        ({b"d-e/x": "D"}, {b"d": "A"}, False),
    ],
)
def test_changes_meet_at_a_path_a_directory_or_a_renamed_directory(
    one: dict[bytes, str], other: dict[bytes, str], meet: bool
) -> None:
    assert Touched.of(one).may_meet(Touched.of(other)) is Touched.of(other).may_meet(Touched.of(one)) is meet


@pytest.mark.sampled(1)
@pytest.mark.parametrize("seed", range(12))
def test_changes_that_cannot_meet_merge_in_every_random_case(
    repository: Repository, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the rule that spares merges, the same conflicts are found."""
    import random

    random_ = random.Random(seed)
    for name in ("one", "two", "three"):
        top = repository.payload(name)
        for _ in range(random_.randrange(1, 4)):
            path = random_.choice(["a", "b", "deep/d", "deep/er/c", "new", "deep/new", "deep/er/new", "a/below"])
            act = random_.choice(["edit", "remove", "rename", "rename directory"])
            if act == "edit" and not (top / path).is_dir() and not any(each.is_file() for each in (top / path).parents):
                change(repository, name, path, f"{name} {random_.random()}", random_.randrange(3))
            elif act == "remove" and (top / path).is_file():
                (top / path).unlink()
            elif act == "rename" and (top / path).is_file():
                (top / path).rename(top / f"renamed{random_.randrange(2)}")
            elif act == "rename directory" and (top / "deep").is_dir() and not (top / "moved").exists():
                (top / "deep").rename(top / "moved")
    quick = find_conflicts(repository)
    shutil.rmtree(repository.context.paths.caches)
    monkeypatch.setattr(Touched, "may_meet", lambda self, other: True)

    thorough = find_conflicts(repository)

    assert quick.conflicts == thorough.conflicts
    assert quick.merges <= thorough.merges


# --- Commands -------------------------------------------------------------------------------------------


def test_people_see_the_pair_the_files_and_what_to_do(repository: Repository) -> None:
    top = repository.payload()
    assert holdfast("conflicts", cwd=top).stdout == "No conflicts: 4 worktrees and trunk.\n"
    change(repository, "one", "a", "one")
    change(repository, "two", "a", "two")

    told = holdfast("conflicts", cwd=top).stdout
    assert told.startswith("one conflicts with two in 1 file: a\n")
    assert "land one first: 'holdfast land two'" in told
    assert data(holdfast("conflicts", "--worktree", "three", "--json", cwd=top))["conflicts"] == []
    [conflict] = data(holdfast("conflicts", "--json", cwd=top))["conflicts"]
    assert conflict | {"messages": []} == {
        "worktree": "one",
        "other": "two",
        "with_target": False,
        "paths": ["a"],
        "messages": [],
    }
    told = holdfast("who", cwd=top).stdout
    assert "one conflicts with two: a" in told.splitlines()[0]
    assert data(holdfast("who", "--json", cwd=top))["conflicts"] == [conflict]

    change(repository, "main", "a", "landed")
    commit_all(top)
    told = holdfast("conflicts", cwd=top).stdout
    assert "one conflicts with trunk in 1 file: a\n" in told
    [merge, land] = re.findall(r"'(git merge \w+|holdfast land one)'", told)
    commit_all(repository.payload("one"))
    assert subprocess.run(merge.split(), cwd=repository.payload("one"), check=False).returncode == 1
    write(repository.payload("one") / "a", "both\n")
    commit_all(repository.payload("one"))
    assert holdfast(*land.split()[1:], cwd=top).returncode == 0
    assert (top / "a").read_text() == "both\n"


def test_an_agent_is_warned_when_its_worktree_conflicts_already(repository: Repository) -> None:
    top = repository.payload()
    holdfast("issue", "init", cwd=top)
    issue = data(holdfast("issue", "create", "work", "--json", cwd=top))["id"]
    change(repository, "one", "a", "one")
    change(repository, "two", "a", "two")
    run = ("agent", "run", "--issue", issue, "--worktree")

    warned = holdfast(*run, "one", "--", *python("raise SystemExit(1)"), cwd=top)
    quiet = holdfast(*run, "three", "--", *python("pass"), cwd=top)

    assert "Warning: one conflicts with two in 1 file: a. See 'holdfast conflicts --worktree one'." in warned.stderr
    assert "conflicts" not in quiet.stderr


def test_a_repository_without_a_commit_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(git_init, "require_safe", lambda directory, records_elsewhere: SAFE)
    git("init", "-q", tmp_path / "new")
    adopt_checkout(tmp_path / "new")
    with pytest.raises(Refused, match="no commit yet"):
        find_conflicts(Repository(tmp_path / "new"))
