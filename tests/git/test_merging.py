"""Merges without a work tree: the same trees and conflicts as `git merge`, with the resolutions of `git rerere`."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from holdfast.errors import GitFailed
from holdfast.git.contents import TreeEntry, commit_tree
from holdfast.git.merging import Merged, is_attributes, merge, write_attributes
from holdfast.git.program import Git
from holdfast.git.resolutions import conflict_id, normalized
from tests.git.conftest import commit_all, git, new_repository, write

LINES = "".join(f"line {number}\n" for number in range(40))


@pytest.fixture
def top(tmp_path: Path) -> Path:
    """A checkout on the branch `ours`, and the branch `theirs` at the same commit."""
    top = new_repository(tmp_path / "merged")
    write(top / "text", LINES)
    write(top / "sub/text", LINES)
    write(top / "binary", bytes(range(256)))
    commit_all(top)
    git(top, "branch", "theirs")
    git(top, "checkout", "-q", "-b", "ours")
    return top


def on(top: Path, branch: str, change: Callable[..., object], *arguments: object) -> str:
    """Commit a change on a branch."""
    git(top, "checkout", "-q", branch)
    change(*arguments)
    commit = commit_all(top)
    git(top, "checkout", "-q", "ours")
    return commit


def edit(path: Path, line: int, text: str) -> Path:
    lines = path.read_text().splitlines(keepends=True)
    lines[line] = text
    return write(path, "".join(lines))


def conflicting(top: Path, path: str = "text", line: int = 5, text: str = "a line") -> tuple[str, str]:
    """The commits of two branches that change the same line."""
    mine = on(top, "ours", edit, top / path, line, f"{text} of mine\n")
    return mine, on(top, "theirs", edit, top / path, line, f"{text} of yours\n")


def merged_by_git(top: Path, commit: str) -> tuple[str | None, set[str]]:
    """The tree that `git merge` makes on the branch `ours`, or None and the paths that it leaves unmerged."""
    git(top, "merge", "-q", "--no-commit", "--no-ff", commit, check=False)
    unmerged = {line.partition("\t")[2] for line in git(top, "ls-files", "-u").splitlines()}
    tree = None if unmerged else git(top, "write-tree")
    git(top, "reset", "-q", "--hard")
    git(top, "clean", "-fdq")
    return tree, unmerged


def state_of(top: Path) -> list[object]:
    """Everything that a merge must not change, objects included."""
    files = sorted(
        (os.path.join(at, name), (Path(at) / name).stat().st_mtime_ns)
        for at, _, names in os.walk(top)
        for name in names
    )
    return [files, git(top, "--no-optional-locks", "status", "--porcelain=v2", "--branch"), git(top, "for-each-ref")]


def test_a_merge_has_the_tree_that_git_makes(top: Path) -> None:
    mine = on(top, "ours", lambda: (edit(top / "text", 3, "mine\n"), write(top / "new", "new\n")))
    yours = on(top, "theirs", lambda: (edit(top / "text", 30, "yours\n"), git(top, "mv", "sub/text", "sub/moved")))

    assert merge(Git(top / ".git"), mine, yours) == Merged(merged_by_git(top, yours)[0])


# --- Kinds of conflicts ---------------------------------------------------------------------------------


def content(top: Path, side: str) -> None:
    edit(top / "text", 5, f"{side}\n")


def added_on_both_sides(top: Path, side: str) -> None:
    write(top / "sub/new", f"{side}\n")


def renamed_on_both_sides(top: Path, side: str) -> None:
    git(top, "mv", "text", f"text of {side}")


def deleted_and_modified(top: Path, side: str) -> None:
    (top / "text").unlink() if side == "ours" else edit(top / "text", 5, "changed\n")


def directory_and_file(top: Path, side: str) -> None:
    write(top / ("entry/file" if side == "ours" else "entry"), side)


def binary(top: Path, side: str) -> None:
    write(top / "binary", bytes(range(255)) + side.encode())


def mode(top: Path, side: str) -> None:
    write(top / "script", "#!/bin/sh\n").chmod(0o755 if side == "ours" else 0o644)


def kind(top: Path, side: str) -> None:
    (top / "text").unlink()
    (top / "text").symlink_to(side) if side == "ours" else write(top / "text/file", "x")


def link(top: Path, side: str) -> None:
    (top / "text").unlink()
    (top / "text").symlink_to(side)


def submodule(top: Path, side: str) -> None:
    module = new_repository(top / "module") if not (top / "module/.git").exists() else top / "module"
    write(module / "file", side)
    git(module, "checkout", "-q", "--orphan", f"for-{side}")
    commit_all(module)


def directory_renamed_two_ways(top: Path, side: str) -> None:
    if side == "ours":
        for old, new in {"a": "left", "b": "left", "c": "right", "text": "right"}.items():
            (top / new).mkdir(exist_ok=True)
            git(top, "mv", f"sub/{old}", f"{new}/{old}")
    else:
        write(top / "sub/new", "new\n")


KINDS = [
    content,
    added_on_both_sides,
    renamed_on_both_sides,
    deleted_and_modified,
    directory_and_file,
    binary,
    mode,
    kind,
    link,
    submodule,
]


@pytest.mark.parametrize("change", KINDS, ids=lambda each: each.__name__)
def test_every_kind_of_conflict_is_found_as_git_finds_it(top: Path, change: Callable[[Path, str], None]) -> None:
    mine, yours = (on(top, side, change, top, side) for side in ("ours", "theirs"))

    found = merge(Git(top / ".git"), mine, yours)
    expected = {path.partition("~")[0] for path in merged_by_git(top, yours)[1]}

    assert found.tree is None
    assert expected
    assert expected <= set(found.conflicts)
    assert not any("~" in path for path in found.conflicts)
    assert any("CONFLICT" in message for message in found.messages)


def test_a_conflict_without_an_unmerged_entry_is_one(top: Path) -> None:
    for name in "abc":
        write(top / "sub" / name, f"{name}\n" * 20)
    commit_all(top)
    git(top, "branch", "-f", "theirs", "ours")
    sides = [on(top, side, directory_renamed_two_ways, top, side) for side in ("ours", "theirs")]

    found = merge(Git(top / ".git"), *sides)

    assert found.tree is None
    assert "sub" in found.conflicts


def test_names_of_any_bytes_are_told(top: Path) -> None:
    odd = os.fsdecode(b'odd\n\t"name" \xff~ours')
    write(top / odd, LINES)
    commit_all(top)
    git(top, "branch", "-f", "theirs", "ours")

    assert merge(Git(top / ".git"), *conflicting(top, odd)).conflicts == (odd,)


def test_commits_without_a_common_ancestor_are_not_merged(top: Path) -> None:
    mine = git(top, "rev-parse", "HEAD")
    git(top, "checkout", "-q", "--orphan", "other")
    other = commit_all(top, "another root")

    with pytest.raises(GitFailed, match="unrelated histories"):
        merge(Git(top / ".git"), mine, other)


@pytest.mark.parametrize("place", [".gitattributes", "sub/.gitattributes", ".git/info/attributes"])
def test_the_merge_driver_of_an_attribute_is_used(top: Path, tmp_path: Path, place: str) -> None:
    git(top, "config", "merge.own.driver", "printf 'driven\\n' >%A")
    write(top / place, "text merge=own\n")
    commit_all(top)
    git(top, "branch", "-f", "theirs", "ours")
    mine, yours = conflicting(top, "sub/text")
    ours, attributes = Git(top / ".git"), tmp_path / "attributes"
    write_attributes(ours, mine, attributes)

    found = merge(ours, mine, yours, attributes=attributes)

    assert found == Merged(merged_by_git(top, yours)[0])
    assert git(top, "show", f"{found.tree}:sub/text") == "driven"
    assert [each.name for each in attributes.rglob("*") if each.is_file()] == [".gitattributes"] * (
        ".git/" not in place
    )


def test_only_plain_files_become_attributes(top: Path, tmp_path: Path) -> None:
    write(top / "outside", "* merge=union\n")
    (top / ".gitattributes").symlink_to("outside")
    commit = commit_all(top)

    write_attributes(Git(top / ".git"), commit, tmp_path / "attributes")

    assert list((tmp_path / "attributes").iterdir()) == []


def test_with_a_directory_for_objects_the_repository_stays_as_it_was(top: Path, tmp_path: Path) -> None:
    """Trees of uncommitted work become commits there, and merge and conflict like others."""
    mine, yours = conflicting(top)
    ours = Git(top / ".git")
    (objects := tmp_path / "objects").mkdir()
    before = state_of(top)
    blob = ours.run("hash-object", "-w", "--stdin", objects=objects, content=b"uncommitted\n").decode().strip()
    tree = ours.run("mktree", objects=objects, content=f"100644 blob {blob}\tfile\n".encode()).decode().strip()
    mine, one = (commit_tree(ours, each, [mine], objects=objects) for each in (f"{mine}^{{tree}}", tree))

    assert merge(ours, mine, yours, objects=objects).conflicts == ("text",)
    assert merge(ours, one, yours, objects=objects).conflicts == ("text",)  # deleted and modified
    assert merge(ours, mine, one, objects=objects).tree == tree
    assert state_of(top) == before


# --- Recorded resolutions -------------------------------------------------------------------------------


def record(top: Path, commit: str, text: dict[str, str]) -> None:
    """Merge as a user does who resolves the conflicts, and undo the merge: `git rerere` knows how since."""
    git(top, "config", "rerere.enabled", "true")
    git(top, "merge", "-q", commit, check=False)
    for path, resolved in text.items():
        write(top / path, resolved)
    git(top, "rerere")
    git(top, "reset", "-q", "--hard")


def resolved_by_git(top: Path, commit: str) -> str | None:
    git(top, "-c", "rerere.autoUpdate=true", "merge", "-q", "--no-commit", commit, check=False)
    tree = None if git(top, "ls-files", "-u") else git(top, "write-tree")
    git(top, "reset", "-q", "--hard")
    return tree


def test_a_recorded_resolution_is_used_in_every_worktree(top: Path) -> None:
    mine, yours = conflicting(top, "sub/text")
    resolved = LINES.replace("line 5\n", "both\n")
    record(top, yours, {"sub/text": resolved})
    before = sorted(path for path in (top / ".git/rr-cache").rglob("*"))
    ours = Git(top / ".git")

    for one, other in ((mine, yours), (yours, mine)):
        found = merge(ours, one, other)
        assert found.tree is not None
        assert found.conflicts == ()
        assert found.resolved == ("sub/text",)
        assert ours.run("cat-file", "blob", f"{found.tree}:sub/text").decode() == resolved
    assert sorted(path for path in (top / ".git/rr-cache").rglob("*")) == before
    assert found.tree == resolved_by_git(top, yours)


def test_a_resolution_is_merged_into_a_file_that_changed_elsewhere_since(top: Path) -> None:
    _, yours = conflicting(top)
    record(top, yours, {"text": LINES.replace("line 5\n", "both\n")})
    mine = on(top, "ours", lambda: edit(top / "text", 30, "later\n"))

    found = merge(Git(top / ".git"), mine, yours)

    assert found.tree is not None
    assert found.tree == resolved_by_git(top, yours)
    assert "later" in git(top, "show", f"{found.tree}:text")


def test_a_conflict_without_its_resolution_stays_one(top: Path) -> None:
    """One of two files is not enough, another conflict has another name, and rerere may be switched off."""
    _, yours = conflicting(top)
    record(top, yours, {"text": LINES})
    ours = Git(top / ".git")
    mine = git(top, "rev-parse", "HEAD")
    assert merge(ours, mine, yours).resolved == ("text",)

    git(top, "config", "rerere.enabled", "false")
    assert merge(ours, mine, yours).conflicts == ("text",)
    git(top, "config", "--unset", "rerere.enabled")
    assert merge(ours, mine, yours).resolved == ("text",)

    both = conflicting(top, "sub/text", text="another line")
    assert merge(ours, *both).conflicts == ("sub/text", "text")
    other = on(top, "theirs", lambda: edit(top / "text", 5, "something else\n"))
    assert merge(ours, mine, other).conflicts == ("text",)


def test_a_resolution_that_does_not_fit_any_more_is_not_used(top: Path) -> None:
    """What the user resolved reaches into lines that others have changed since."""
    _, yours = conflicting(top)
    record(top, yours, {"text": LINES.replace("line 5\n", "both\n").replace("line 30\n", "also here\n")})
    mine = on(top, "ours", lambda: edit(top / "text", 30, "later\n"))

    assert resolved_by_git(top, yours) is None
    assert merge(Git(top / ".git"), mine, yours).conflicts == ("text",)


def new_with_mode(top: Path, side: str) -> None:
    write(top / "new", f"{side}\n").chmod(0o755 if side == "ours" else 0o644)


def test_other_conflicts_are_never_taken_for_resolved(top: Path) -> None:
    """A resolution has no mode, and none for a file that is deleted on one side."""
    for side in ("ours", "theirs"):
        on(top, side, new_with_mode, top, side)
    record(top, "theirs", {"new": "both\n"})

    assert merge(Git(top / ".git"), "ours", "theirs").conflicts == ("new",)


@pytest.mark.parametrize("style", ["merge", "diff3"])
@pytest.mark.parametrize("algorithm", ["sha1", "sha256"])
def test_conflicts_have_the_names_that_git_gives_them(tmp_path: Path, style: str, algorithm: str) -> None:
    top = new_repository(tmp_path / "merged", f"--object-format={algorithm}")
    git(top, "config", "merge.conflictStyle", style)
    write(top / "text", LINES)
    commit_all(top)
    git(top, "branch", "theirs")
    git(top, "checkout", "-q", "-b", "ours")
    for line in (5, 20, 35):
        conflicting(top, line=line)
    git(top, "config", "rerere.enabled", "true")
    git(top, "merge", "-q", "theirs", check=False)
    [name] = (each.name for each in (top / ".git/rr-cache").iterdir())

    found = normalized((top / "text").read_bytes())

    assert found is not None
    assert len(found.sides) == 6
    assert conflict_id(found, is_sha256=algorithm == "sha256") == name
    assert found.text == (top / ".git/rr-cache" / name / "preimage").read_bytes()
    git(top, "checkout", "-q", "--theirs", "text")
    git(top, "rerere")
    git(top, "reset", "-q", "--hard")
    assert merge(Git(top / ".git"), "ours", "theirs").tree == resolved_by_git(top, "theirs") is not None


@pytest.mark.parametrize(
    "text",
    [
        "",
        "no conflict\n=======\n",
        "<<<<<<< a\n1\n=======\n2\n",
        "<<<<<<< a\n1\n>>>>>>> b\n",
        "<<<<<<< a\n1\n=======\n2\n=======\n3\n>>>>>>> b\n",
        "<<<<<<< a\n1\n=======\n2\n||||||| c\n3\n>>>>>>> b\n",
        "<<<<<<<\n1\n=======\n2\n>>>>>>>\n",
        "<<<<<<< a\n\0\n=======\n2\n>>>>>>> b\n",
    ],
)
def test_markers_that_do_not_match_are_no_conflict(text: str) -> None:
    assert normalized(text.encode()) is None


def edit_all(path: Path, edits: dict[int, str]) -> None:
    for line, text in edits.items():
        edit(path, line, text)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("seed", range(20))
def test_random_merges_end_as_those_of_git(top: Path, seed: int) -> None:
    """Including resolutions, markers inside of contents, and resolutions that fit only partly."""
    random_ = random.Random(seed)
    words = ["mine\n", "yours\n", "", "two\nlines\n", "<<<<<<< x\n", "=======\n", "no newline", "a\r\n"]
    ours = Git(top / ".git")
    for _ in range(4):
        for side in ("ours", "theirs"):
            path = random_.choice(["text", "sub/text"])
            edits = {random_.randrange(20): random_.choice(words) for _ in range(random_.randrange(1, 4))}
            on(top, side, edit_all, top / path, edits)
        found, expected = merge(ours, "ours", "theirs"), resolved_by_git(top, "theirs")
        assert found.tree == expected
        if expected is None:
            record(top, "theirs", {each: f"{LINES}resolved {random_.random()}\n" for each in found.conflicts})


@pytest.mark.parametrize(("size", "counts"), [(100, True), (101 << 20, False)])
def test_attributes_that_git_ignores_for_their_size_are_not_read(size: int, counts: bool) -> None:
    assert is_attributes(TreeEntry(b"sub/.gitattributes", "f", "100644", "0" * 40, size)) == counts
