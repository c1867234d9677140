"""Differences between trees are found, in order and with their aspects; so is damage to a tree."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from holdfast.trees.capture import capture
from holdfast.trees.engines import Engine
from holdfast.trees.manifest import MANIFEST, PAYLOAD, READY
from holdfast.trees.verify import changes, compare, verify
from tests.trees.groves import grow, set_xattr


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return grow(tmp_path / "source")


@pytest.fixture
def tree(source: Path, tmp_path: Path) -> Path:
    capture(source, tmp_path / "tree", engine=Engine.LINKED, quiesced=True)
    return tmp_path / "tree"


def _become_a_link(path: Path) -> None:
    path.unlink()
    path.symlink_to("elsewhere")


def _relink(path: Path) -> None:
    path.unlink()
    path.symlink_to("elsewhere")


MODIFIED: dict[str, tuple[str, Callable[[Path], object], set[str]]] = {
    "content": ("script", lambda path: path.write_bytes(b"#!/bin/no\n"), {"content", "mtime"}),
    "time alone": ("script", lambda path: os.utime(path, ns=(1, 1)), {"mtime"}),
    "mode": ("big", lambda path: path.chmod(0o600), {"mode"}),
    "kind": ("script", _become_a_link, {"kind", "target"}),
    "target": ("dangling", _relink, {"target"}),
    "mode of a directory": ("empty", lambda path: path.chmod(0o700), {"mode"}),
    "attribute": ("big", lambda path: set_xattr(path, "user.x", b"y"), {"xattrs"}),
}


@pytest.mark.parametrize("name", MODIFIED)
def test_a_modification_is_found_with_its_aspects(source: Path, tree: Path, tmp_path: Path, name: str) -> None:
    what, modify, aspects = MODIFIED[name]
    modify(source / what)
    (found,) = [each for each in changes(source, tree) if each.path == what.encode()]
    capture(source, tmp_path / "second", engine=Engine.COPY, quiesced=True)

    assert found.what == "modified"
    assert aspects <= set(found.aspects) or name == "attribute"
    assert list(compare(tree, tmp_path / "second")) == list(changes(source, tree))
    assert [each.what for each in compare(tmp_path / "second", tree) if each.path == what.encode()] == ["modified"]


def test_added_and_removed_directories_are_listed_with_their_contents(source: Path, tree: Path) -> None:
    (source / "a").rename(source / "z")
    found = [(each.what, each.path) for each in changes(source, tree)]

    assert ("removed", b"a/b/c/file") in found
    assert ("added", b"z/b/c/file") in found
    assert [path for what, path in found if what == "added" and b"/" not in path] == [b"z"]
    directories = [path for _, path in found if path in (b"", b"a", b"a/b", b"z", b"z/b")]
    assert directories == sorted(directories)


def test_an_equal_tree_has_no_changes(source: Path, tree: Path) -> None:
    assert list(changes(source, tree)) == []
    assert list(compare(tree, tree)) == []


# --- Verifying --------------------------------------------------------------------------------------


def _rewrite(path: Path, content: bytes) -> None:
    path.chmod(0o600)
    status = path.stat()
    path.write_bytes(content)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def _flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.unlink()
    path.write_bytes(content)


DAMAGE: dict[str, tuple[Callable[[Path], object], tuple[str, str]]] = {
    "content": (lambda tree: _rewrite(tree / PAYLOAD / "script", b"#!/bin/xx\n"), ("script", "content")),
    "size": (lambda tree: _rewrite(tree / PAYLOAD / "script", b""), ("script", "content")),
    "missing": (lambda tree: (tree / PAYLOAD / "script").unlink(), ("script", "missing")),
    "missing directory": (lambda tree: (tree / PAYLOAD / "empty").rmdir(), ("empty", "missing")),
    "extra": (lambda tree: (tree / PAYLOAD / "a/extra").touch(), ("a/extra", "extra")),
    "target": (lambda tree: _relink(tree / PAYLOAD / "dangling"), ("dangling", "target")),
    "kind": (lambda tree: _become_a_link(tree / PAYLOAD / "script"), ("script", "kind")),
    "mode": (lambda tree: (tree / PAYLOAD / "big").chmod(0o777), ("big", "mode")),
    "time": (lambda tree: os.utime(tree / PAYLOAD / "big"), ("big", "mtime")),
    "mark": (lambda tree: (tree / READY).unlink(), (READY, "ready")),
    "manifest": (lambda tree: _flip(tree / MANIFEST), (MANIFEST, "manifest")),
    "no manifest": (lambda tree: (tree / MANIFEST).unlink(), (MANIFEST, "manifest")),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_is_found(source: Path, tmp_path: Path, name: str) -> None:
    tree = tmp_path / "tree"
    captured = capture(source, tree, engine=Engine.LINKED, quiesced=True)
    assert list(verify(tree, captured.payload_hash)) == []
    damage, problem = DAMAGE[name]
    damage(tree)

    assert problem in [(each.path, each.what) for each in verify(tree, captured.payload_hash)]


def test_a_tree_with_another_hash_than_expected_is_found(tree: Path) -> None:
    assert {each.what for each in verify(tree, "0" * 64)} == {"ready", "manifest"}
