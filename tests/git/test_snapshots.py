"""A work tree becomes a commit by git's rules, and nothing of the user's changes."""

from __future__ import annotations

import os
import shutil
import tracemalloc
import zlib
from pathlib import Path

import pytest

from holdfast.errors import AlreadyExists, ConsistencyUnavailable, GitFailed, NotFound, TooLarge
from holdfast.git import contents, look, snapshots
from holdfast.git.restore import unsaved
from tests.git.conftest import Home, commit_all, content_of, fingerprint, git, new_repository, write
from tests.support.homes import approve_programs


def committed(captured: snapshots.GitCaptured) -> str:
    assert captured.commit is not None
    return captured.commit


def test_a_snapshot_has_what_is_tracked_and_what_is_not_ignored(home: Home) -> None:
    write(home.top / ".gitignore", "*.log\nbuild/\n")
    write(home.top / "x.log", "ignored")
    write(home.top / "build/deep/file", "ignored")
    write(home.top / "new/file", "new")
    write(home.top / "one", "changed\n")
    (home.top / "two").unlink()

    captured = home.capture()

    kept = {path: each for path, each in content_of(home.top).items() if not path.endswith((b".log", b"deep/file"))}
    assert home.exported(committed(captured)) == kept
    assert captured.left_out == snapshots.LeftOut(2, 0, ("build/", "x.log"))
    assert captured.files == 4
    assert captured.bytes == sum(len(content) for _, content in kept.values())
    assert git(home.top, "rev-parse", f"{captured.commit}^") == git(home.top, "rev-parse", "HEAD")
    assert git(home.top, "log", "-1", "--format=%B", committed(captured)) == "snapshot s0\n\nHoldfast-Snapshot: s0\n"


def test_nothing_of_the_users_changes(home: Home) -> None:
    write(home.top / "one", "staged\n")
    git(home.top, "add", "one")
    git(home.top, "stash")
    write(home.top / "one", "staged\n")
    git(home.top, "add", "one")
    write(home.top / "one", "changed\n")
    write(home.top / "new", "new\n")
    git(home.top, "config", "core.logAllRefUpdates", "always")
    before, files = fingerprint(home.git.common), content_of(home.top)

    one = home.capture()
    write(home.top / "new", "newer\n")
    two = home.capture(one)
    list(contents.compare(home.git, committed(one), committed(two)))
    home.unsaved(one.tree)
    home.exported(committed(one))
    list(contents.verify(home.git, committed(two)))
    contents.reclaimable(home.git, [committed(one)], [committed(two)])
    snapshots.delete_refs(home.git, ["s0"])

    assert fingerprint(home.git.common) == before
    assert content_of(home.top) == files | {b"new": ("f", b"newer\n")}
    assert git(home.top, "fsck", "--no-dangling") == ""


def test_locks_of_a_running_git_do_not_matter(home: Home) -> None:
    for name in ("index.lock", "HEAD.lock", "config.lock", "packed-refs.lock", "refs/heads/trunk.lock"):
        write(home.git.common / name, "")
    write(home.top / "new", "new\n")

    assert home.unsaved(home.capture().tree) == []


def test_a_tree_that_equals_its_parents_is_not_stored(home: Home) -> None:
    one = home.capture()
    os.utime(home.top / "one", (1, 1))

    two = home.capture(one)

    assert (two.commit, two.pack, two.tree, two.files, two.bytes) == (None, None, one.tree, one.files, one.bytes)
    assert home.capture().commit not in (None, one.commit)


def test_counts_follow_the_changes(home: Home) -> None:
    captured = home.capture()
    for content in ("", "x" * 1000, "yy"):
        write(home.top / "one", content)
        write(home.top / f"new{len(content)}", "x")
        captured = home.capture(captured)
        found = content_of(home.top)
        assert (captured.files, captured.bytes) == (len(found), sum(len(each) for _, each in found.values()))


def test_a_snapshot_before_the_first_commit_has_no_parent(tmp_path: Path) -> None:
    home = Home(new_repository(tmp_path / "new"))
    empty = home.capture()
    assert home.exported(committed(empty)) == {}
    write(home.top / "file", "x")

    captured = home.capture(empty)

    assert git(home.top, "log", "--format=%P", committed(captured)) == ""
    assert home.exported(committed(captured)) == {b"file": ("f", b"x")}
    assert [each.what for each in contents.compare(home.git, committed(empty), committed(captured))] == ["added"]


def test_a_repository_with_sha256_is_captured(tmp_path: Path) -> None:
    home = Home(new_repository(tmp_path / "new", "--object-format=sha256"))
    write(home.top / "file", "x")
    commit_all(home.top)
    one = home.capture()
    write(home.top / "file", "y")
    (home.top / "file").chmod(0o755)

    two = home.capture(one)

    assert len(committed(two)) == 64
    assert home.exported(committed(two)) == {b"file": ("x", b"y")}
    assert list(contents.verify(home.git, committed(two))) == []


def test_names_may_have_any_bytes(home: Home) -> None:
    names = [
        b"a\nb",
        b"\xff\xfe",
        b'tab\tquote"back\\slash',
        b" blank ",
        b"-dash",
        b":(glob)*",
        b"*",
        b"\xc3\xa9",
        b'"q"',
    ]
    write(home.top / '"dir/"file', "quotes come first")
    for name in names:
        write(home.top / os.fsdecode(name), b"content of " + name)
        write(home.top / os.fsdecode(b"dir" + name) / "file", name)

    captured = home.capture()

    assert home.exported(committed(captured)) == content_of(home.top)
    for name in names:
        assert contents.read_file(home.git, committed(captured), name, 100) == b"content of " + name
        (home.top / os.fsdecode(name)).write_bytes(b"changed")
    assert {each.path for each in home.unsaved(captured.tree)} == set(names)
    for name in names:
        (home.top / os.fsdecode(name)).unlink()
    assert home.exported(committed(home.capture(captured))) == content_of(home.top)


def test_a_snapshot_may_be_empty_and_may_follow_an_empty_one(home: Home) -> None:
    one = home.capture()
    for each in home.top.iterdir():
        if each.name != ".git":
            shutil.rmtree(each) if each.is_dir() else each.unlink()
    two = home.capture(one)
    assert home.exported(committed(two)) == {}
    write(home.top / "new/file", "new")
    assert home.exported(committed(home.capture(two))) == content_of(home.top)


def test_modes_that_old_versions_of_git_wrote_do_no_harm(home: Home) -> None:
    blob = git(home.top, "hash-object", "-w", "--stdin", content=b"old\n")
    raw = b"".join(b"100664 %s\0%s" % (name, bytes.fromhex(blob)) for name in (b"a", b"b"))
    sub = git(home.top, "hash-object", "-t", "tree", "-w", "--literally", "--stdin", content=raw)
    tree = git(home.top, "mktree", content=f"040000 tree {sub}\tsub\n".encode())
    git(home.top, "reset", "-q", "--hard", git(home.top, "commit-tree", "-m", "old", tree))
    write(home.top / "sub/a", "new\n")

    one = home.capture()

    assert home.exported(committed(one)) == content_of(home.top)
    assert home.unsaved(one.tree) == []
    assert home.capture(one).commit is None
    assert git(home.top, "rev-parse", f"{one.commit}^{{tree}}") == one.tree


def test_kinds_of_files_change_into_each_other(home: Home) -> None:
    write(home.top / "run", "#!/bin/sh\n").chmod(0o755)
    (home.top / "link").symlink_to("one")
    write(home.top / "dir/a", "a")
    write(home.top / "file", "file")
    write(home.top / "linked-away/inner", "x")
    one = home.capture()
    assert home.exported(committed(one)) == content_of(home.top)
    (home.top / "run").chmod(0o644)
    (home.top / "link").unlink()
    write(home.top / "link", "one")
    shutil.rmtree(home.top / "dir")
    write(home.top / "dir", "a file")
    (home.top / "file").unlink()
    write(home.top / "file/inner", "x")
    shutil.rmtree(home.top / "linked-away")
    (home.top / "linked-away").symlink_to("sub")
    (home.top / "one").unlink()
    (home.top / "one").symlink_to("nowhere")
    changes = home.unsaved(one.tree)

    two = home.capture(one)

    assert home.exported(committed(two)) == content_of(home.top)
    assert sorted(each[:4] for each in contents.compare(home.git, one.tree, two.tree)) == [each[:4] for each in changes]
    found = {each.path: each for each in changes}
    assert found[b"run"].aspects == ("mode",)
    assert found[b"link"].aspects == ("kind",)
    assert found[b"linked-away/inner"].what == "removed"


def test_an_ignored_link_in_the_place_of_a_directory(home: Home) -> None:
    write(home.top / ".gitignore", "/sub\n")
    one = home.capture()
    shutil.rmtree(home.top / "sub")
    (home.top / "sub").symlink_to("/")

    assert set(home.exported(committed(home.capture(one)))) == {b".gitignore", b"one", b"two"}


def test_files_that_are_tracked_although_ignored_stay(home: Home) -> None:
    write(home.top / ".gitignore", "*.log\n")
    write(home.top / "kept.log", "x")
    git(home.top, "add", "-f", "kept.log")
    one = home.capture()
    write(home.top / "kept.log", "y")

    assert home.exported(committed(home.capture(one)))[b"kept.log"] == ("f", b"y")


def test_flags_of_the_users_index_hide_nothing(home: Home) -> None:
    git(home.top, "update-index", "--assume-unchanged", "one")
    git(home.top, "update-index", "--skip-worktree", "two")
    write(home.top / "one", "hidden 1\n")
    write(home.top / "two", "hidden 2\n")
    write(home.top / "intended", "x")
    git(home.top, "add", "-N", "intended")
    before = fingerprint(home.git.common)

    captured = home.capture()

    assert home.exported(committed(captured)) == content_of(home.top)
    assert fingerprint(home.git.common) == before


def test_a_sparse_checkout_keeps_what_is_not_checked_out(home: Home) -> None:
    git(home.top, "sparse-checkout", "set", "--no-cone", "/one")
    assert not (home.top / "two").exists()
    write(home.top / "one", "changed\n")

    captured = home.capture()

    found = home.exported(committed(captured))
    assert found[b"two"] == ("f", b"two\n")
    assert found[b"one"] == ("f", b"changed\n")
    assert home.unsaved(captured.tree) == []
    write(home.top / "sub/three", "back again\n")
    assert home.exported(committed(home.capture(captured)))[b"sub/three"] == ("f", b"back again\n")


def test_a_sparse_checkout_follows_the_commit_in_what_is_not_checked_out(home: Home) -> None:
    git(home.top, "sparse-checkout", "set", "--no-cone", "/one")
    first = home.capture()
    new = git(home.top, "hash-object", "-w", "--stdin", content=b"of a later commit")
    git(home.top, "update-index", "--cacheinfo", f"100644,{new},two")
    git(home.top, "update-index", "--skip-worktree", "two")
    git(home.top, "commit", "-q", "-m", "later")

    assert [each.path for each in home.unsaved(first.tree)] == [b"two"]
    second = home.capture(first)
    assert second.tree == git(home.top, "rev-parse", "HEAD^{tree}")
    assert not (home.top / "two").exists()


@pytest.mark.parametrize("setting", ["core.splitIndex", "index.sparse", "core.untrackedCache", "feature.manyFiles"])
def test_an_index_of_another_form_is_read(home: Home, setting: str) -> None:
    git(home.top, "config", setting, "true")
    write(home.top / "staged", "x")
    git(home.top, "add", "staged")
    git(home.top, "status")
    write(home.top / "one", "changed\n")
    before = fingerprint(home.git.common)

    assert home.exported(committed(home.capture())) == content_of(home.top)
    assert fingerprint(home.git.common) == before


def test_unmerged_files_are_taken_as_they_are(home: Home) -> None:
    git(home.top, "checkout", "-q", "-b", "other")
    write(home.top / "one", "theirs\n")
    (home.top / "two").unlink()
    commit_all(home.top)
    git(home.top, "checkout", "-q", "trunk")
    write(home.top / "one", "ours\n")
    write(home.top / "two", "ours\n")
    commit_all(home.top)
    git(home.top, "merge", "other", check=False)
    (home.top / "two").unlink()
    assert "UU one" in git(home.top, "status", "--porcelain")
    before = fingerprint(home.git.common)

    captured = home.capture()

    assert home.exported(committed(captured)) == content_of(home.top)
    assert b"<<<<<<<" in home.exported(committed(captured))[b"one"][1]
    assert home.unsaved(captured.tree) == []
    assert fingerprint(home.git.common) == before


def test_nested_repositories_are_links_or_left_out(home: Home) -> None:
    inner = new_repository(home.top / "inner")
    write(inner / "file", "x")
    commit = commit_all(inner)
    write(new_repository(home.top / "young") / "file", "x")

    captured = home.capture()

    assert captured.left_out == snapshots.LeftOut(0, 2, ("young/",))
    assert captured.files == 3
    assert {each.oid for each in contents.entries(home.git, committed(captured)) if each.kind == "m"} == {commit}
    assert set(home.exported(committed(captured))) == {b"one", b"two", b"sub/three"}
    assert home.unsaved(captured.tree) == []
    write(inner / "file", "y")  # not ours to keep
    assert home.unsaved(captured.tree) == []
    commit_all(inner)
    assert [(each.path, each.kind) for each in home.unsaved(captured.tree)] == [(b"inner", "m")]
    shutil.rmtree(inner)
    assert home.capture(captured).left_out.nested == 1


def test_the_files_of_a_former_nested_repository_are_content(home: Home) -> None:
    write(home.top / ".gitignore", "*.log\n")
    for name in ("vendor", "emptied"):
        write(new_repository(home.top / name) / "file", "x")
        commit_all(home.top / name)
    first = home.capture()
    for name in ("vendor", "emptied"):
        shutil.rmtree(home.top / name / ".git")
    (home.top / "emptied/file").unlink()
    write(home.top / "vendor/deep/precious", "work")
    write(home.top / "vendor/x.log", "ignored")
    write(new_repository(home.top / "vendor/inner") / "file", "x")
    commit_all(home.top / "vendor/inner")

    unsaved = {(each.path, each.what) for each in home.unsaved(first.tree)}
    second = home.capture(first)

    assert unsaved == {(b"vendor", "removed")} | {
        (each, "added") for each in (b"vendor/file", b"vendor/deep/precious", b"vendor/inner")
    }
    found = home.exported(committed(second))
    assert {path for path in found if path.startswith(b"vendor")} == {b"vendor/file", b"vendor/deep/precious"}
    assert home.unsaved(second.tree) == []
    assert home.capture(second).commit is None


def test_files_in_a_submodule_that_is_not_checked_out_are_content(home: Home) -> None:
    write(new_repository(home.top / "mod") / "file", "x")
    commit_all(home.top / "mod")
    commit_all(home.top)
    shutil.rmtree(home.top / "mod/.git")

    before = home.unsaved(git(home.top, "rev-parse", "HEAD^{tree}"))

    assert [(each.path, each.what) for each in before] == [(b"mod", "removed"), (b"mod/file", "added")]
    assert home.exported(committed(home.capture()))[b"mod/file"] == ("f", b"x")


def test_a_submodule_is_a_link_and_a_checkout_of_its_own(home: Home) -> None:
    other = new_repository(home.top.parent / "other")
    write(other / "file", "x")
    commit_all(other)
    git(home.top, "-c", "protocol.file.allow=always", "submodule", "--quiet", "add", str(other), "mod")
    commit_all(home.top)
    write(home.top / "mod/file", "changed")

    assert home.capture().left_out.nested == 1
    assert Home(home.top / "mod").exported(committed(Home(home.top / "mod").capture())) == {b"file": ("f", b"changed")}


@pytest.mark.parametrize("how", ["linked", "bare", "separate", "detached"])
def test_every_kind_of_checkout_is_captured(checkout: Path, how: str) -> None:
    top = checkout.parent / "w"
    if how == "linked":
        git(checkout, "worktree", "add", "-q", "-b", "w", str(top))
    elif how == "bare":
        git(checkout, "clone", "-q", "--bare", str(checkout), str(checkout.parent / "bare"))
        git(checkout.parent / "bare", "worktree", "add", "-q", "-b", "w", str(top))
    elif how == "separate":
        git(checkout, "clone", "-q", "--separate-git-dir", str(checkout.parent / "dir"), str(checkout), str(top))
        write(checkout.parent / "dir/holdfast/checkout", f"{top}\n")
    else:
        git(checkout, "clone", "-q", str(checkout), str(top))
        git(top, "checkout", "-q", "--detach")
        write(top / "committed", "on no branch")
        commit_all(top)
    home = Home(top)
    write(top / "new", "x")
    before = fingerprint(home.git.common)

    one = home.capture()

    assert home.exported(committed(one)) == content_of(top)
    assert fingerprint(home.git.common) == before
    if how == "detached":
        git(top, "checkout", "-q", "-f", "trunk")
        git(top, "reflog", "expire", "--expire=now", "--all")
    git(top, "gc", "-q", "--prune=now")
    assert git(top, "fsck", "--no-dangling") == ""
    assert home.exported(committed(one))[b"new"] == ("f", b"x")


def test_line_endings_are_converted_as_in_a_commit(home: Home) -> None:
    write(home.top / ".gitattributes", "*.txt text eol=crlf\n*.bin -text\n")
    write(home.top / "a.txt", "one\r\ntwo\r\n")
    write(home.top / "a.bin", "one\r\ntwo\n")
    git(home.top, "config", "core.safecrlf", "true")

    captured = home.capture()

    assert contents.read_file(home.git, committed(captured), b"a.txt", 100) == b"one\ntwo\n"
    assert home.exported(committed(captured)) == content_of(home.top)
    write(home.top / "a.txt", "mixed\r\nendings\n")
    assert contents.read_file(home.git, committed(home.capture(captured)), b"a.txt", 100) == b"mixed\nendings\n"


def test_line_endings_that_were_committed_stay_with_autocrlf(home: Home) -> None:
    write(home.top / "dos", "one\r\n")
    commit_all(home.top)
    git(home.top, "config", "core.autocrlf", "input")
    write(home.top / "dos", "one\r\ntwo\r\n")
    git(home.top, "add", "dos")
    expected = git(home.top, "write-tree")
    git(home.top, "reset", "-q")

    assert home.capture().tree == expected


def test_filters_apply_in_both_directions(home: Home) -> None:
    write(home.top / ".gitattributes", "*.big filter=rot\n")
    for way in ("clean", "smudge"):
        git(home.top, "config", f"filter.rot.{way}", "tr a-zA-Z n-za-mN-ZA-M")
    git(home.top, "config", "filter.rot.required", "true")
    approve_programs(home.top)
    write(home.top / "a.big", "Hello\n")

    captured = home.capture()

    assert contents.read_file(home.git, committed(captured), b"a.big", 100) == b"Uryyb\n"
    assert home.exported(committed(captured))[b"a.big"] == ("f", b"Hello\n")
    git(home.top, "config", "filter.rot.clean", "false")
    approve_programs(home.top)
    write(home.top / "a.big", "Other\n")
    with pytest.raises(GitFailed, match=r"a\.big"):
        home.capture(captured)
    git(home.top, "config", "filter.rot.clean", "tr a-zA-Z n-za-mN-ZA-M")
    assert home.exported(committed(home.capture(captured)))[b"a.big"] == ("f", b"Other\n")


def test_a_change_during_the_capture_is_told(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    real = look.WorkTree.update

    def late(self: look.WorkTree, found: look.Look) -> list[bytes]:
        left_out = real(self, found)
        write(home.top / "late", os.urandom(8))
        return left_out

    monkeypatch.setattr(look.WorkTree, "update", late)
    write(home.top / "new", "x")

    with pytest.raises(ConsistencyUnavailable, match="late"):
        home.capture()
    assert snapshots.kept_packs(home.git) == {}
    assert home.capture(quiesced=False).changed_meanwhile
    assert snapshots.kept_packs(home.git) == {}


def test_a_damaged_private_index_costs_only_time(home: Home) -> None:
    one = home.capture()
    write(home.top / "one", "changed\n")
    for content in (b"", b"nonsense", home.index.read_bytes()[:50]):
        home.index.write_bytes(content)
        assert home.exported(committed(home.capture(one))) == content_of(home.top)


def test_references_are_created_listed_and_deleted(home: Home) -> None:
    one, two = committed(home.capture()), committed(home.capture())

    assert snapshots.refs(home.git) == {"s0": one, "s1": two}
    git(home.top, "pack-refs", "--all")
    assert snapshots.refs(home.git) == {"s0": one, "s1": two}
    with pytest.raises(GitFailed):
        snapshots.create_ref(home.git, "s0", two)
    assert contents.reclaimable(home.git, [one, two], []) > 0
    assert contents.reclaimable(home.git, [], [two]) == 0
    snapshots.delete_refs(home.git, ["s0", "missing"])
    assert snapshots.refs(home.git) == {"s1": two}


def test_deleting_snapshots_frees_what_only_they_need(home: Home) -> None:
    one = home.capture()
    write(home.top / "big", os.urandom(100_000))
    two = home.capture(one)
    (home.top / "big").unlink()

    small, big = committed(one), committed(two)
    assert contents.reclaimable(home.git, [big], [small]) > 100_000
    home.capture(one)
    assert contents.reclaimable(home.git, [small], [big]) < 1000
    git(home.top, "add", "-A")
    assert contents.reclaimable(home.git, [small, big], []) > 100_000


def test_a_part_of_a_snapshot_is_exported(home: Home, tmp_path: Path) -> None:
    write(home.top / ".gitattributes", "*.txt text eol=crlf\n")
    write(home.top / "sub/deep/a.txt", "a\r\n")
    commit = committed(home.capture())

    assert contents.export(home.git, commit, tmp_path / "one", b"one")[:3] == (1, 0, 4)
    assert (tmp_path / "one").read_text() == "one\n"
    done = contents.export(home.git, commit, tmp_path / "sub", b"sub")
    assert (done.files, done.directories) == (2, 2)
    assert content_of(tmp_path / "sub") == {b"three": ("f", b"sub/three\n"), b"deep/a.txt": ("f", b"a\r\n")}
    with pytest.raises(AlreadyExists):
        contents.export(home.git, commit, tmp_path / "sub")
    with pytest.raises(NotFound):
        contents.export(home.git, commit, tmp_path / "x", b"su")
    assert not [each for each in tmp_path.iterdir() if each.name.startswith(".")]


def test_one_file_is_read_up_to_a_limit(home: Home) -> None:
    commit = committed(home.capture())

    assert contents.read_file(home.git, commit, b"sub/three", 10) == b"sub/three\n"
    with pytest.raises(TooLarge):
        contents.read_file(home.git, commit, b"sub/three", 9)
    for path in (b"sub", b"missing", b"on*"):
        with pytest.raises(NotFound):
            contents.read_file(home.git, commit, path, 10)


@pytest.mark.parametrize("most", [1 << 20, 0])
def test_damage_is_found_where_it_is(home: Home, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also in files of which git verifies the content, because they are too large to be read at once."""
    monkeypatch.setattr(contents, "_MOST_AT_ONCE", most)
    write(home.top / "a", "some content")
    write(home.top / "large", "0" * (4 << 20))
    commit = committed(home.capture())
    assert list(contents.verify(home.git, commit)) == []
    git(home.top, "repack", "-adq")
    pack = next((home.git.common / "objects/pack").glob("*.pack"))
    content = pack.read_bytes()
    pack.rename(home.top.parent / "aside")
    for index in (home.git.common / "objects/pack").iterdir():
        index.unlink()
    git(home.top, "unpack-objects", "-q", content=content)
    oid = git(home.top, "rev-parse", f"{commit}:a")
    (home.git.common / "objects" / oid[:2] / oid[2:]).unlink()

    tracemalloc.start()
    assert [(each.path, each.what) for each in contents.verify(home.git, commit)] == [("a", "missing")]
    assert tracemalloc.get_traced_memory()[1] < 2 << 20
    tracemalloc.stop()
    assert [each.what for each in contents.verify(home.git, "0" * 40)] == ["manifest"]
    oid = git(home.top, "rev-parse", f"{commit}:large")
    damaged = home.git.common / "objects" / oid[:2] / oid[2:]
    damaged.chmod(0o644)
    damaged.write_bytes(zlib.compress(b"blob %d\0" % (4 << 20) + bytes(4 << 20)))
    assert [each.path for each in contents.verify(home.git, commit)] == ["a", "large"]


def test_before_the_first_capture_the_users_index_tells_what_is_unsaved(home: Home) -> None:
    write(home.top / "one", "changed\n")
    write(home.top / "new", "new\n")
    (home.top / "two").unlink()
    before = fingerprint(home.git.common)

    found = list(unsaved(home.git, home.top, home.index, "HEAD"))

    assert [each[:5] for each in found] == [
        (b"new", "added", "f", (), 4),
        (b"one", "modified", "f", ("content",), 8),
        (b"two", "removed", "f", (), 4),
    ]
    assert fingerprint(home.git.common) == before
