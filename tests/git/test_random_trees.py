"""Random work trees: what is captured comes back, by every way that leads there."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest

from holdfast.errors import Refused
from holdfast.git import contents
from holdfast.git.restore import restore
from proof import effort
from tests.git.conftest import Home, commit_all, content_of, git, new_repository, write

_NAMES = ["a", "b", "c", "a.log", "a b", "é", "\udcff", "n\nl", "-x", "A"]


def change(top: Path, chance: random.Random) -> None:
    """Write, remove, replace or chmod something at random."""
    parts = [chance.choice(_NAMES) for _ in range(chance.randrange(1, 4))]
    path = top.joinpath(*parts)
    for above in reversed(path.relative_to(top).parents):
        place = top / above
        if above.parts and (place.is_symlink() or place.is_file()):
            place.unlink()
    what = chance.randrange(6)
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    elif path.is_symlink() or (what != 5 and path.exists()):
        path.unlink()
    if what == 0:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    if what == 1:
        path.symlink_to(chance.choice(["a", "../b", "nowhere", "/"]))
    else:
        write(path, chance.randbytes(chance.choice([0, 1, 2, 5000])))
        path.chmod(chance.choice([0o644, 0o755]))


def visible(top: Path) -> dict[bytes, tuple[str, bytes]]:
    """The content without ignored files: no ignored one is tracked here."""
    return {
        path: each
        for path, each in content_of(top).items()
        if not any(part.endswith(b".log") for part in path.split(b"/"))
    }


def plain_comparison(
    one: dict[bytes, tuple[str, bytes]], other: dict[bytes, tuple[str, bytes]]
) -> dict[bytes, tuple[str, str]]:
    kinds = {"x": "f", "f": "f", "l": "l"}
    found = {}
    for path in one.keys() | other.keys():
        if path not in one:
            found[path] = "added", kinds[other[path][0]]
        elif path not in other:
            found[path] = "removed", kinds[one[path][0]]
        elif one[path] != other[path]:
            found[path] = "modified", kinds[other[path][0]]
    return found


@pytest.mark.parametrize("seed", range(effort.rounds(60, least=3)))
def test_whatever_is_captured_comes_back(tmp_path: Path, seed: int) -> None:
    chance = random.Random(f"{effort.SEED} {seed}")
    home = Home(new_repository(tmp_path / "top"))
    write(home.top / ".gitignore", "*.log\n")
    if chance.random() < 0.8:
        commit_all(home.top)
    taken = []
    captured = None
    for _ in range(5):
        for _ in range(chance.randrange(8)):
            change(home.top, chance)
        if chance.random() < 0.3:
            git(home.top, "add", "-A")
        if chance.random() < 0.3:
            commit_all(home.top)
        before = home.unsaved(captured.tree) if captured else []
        fresh = home.capture(captured)
        expected = visible(home.top)
        if captured is not None:
            assert {each.path: (each.what, each.kind) for each in before} == plain_comparison(taken[-1][1], expected)
        assert home.unsaved(fresh.tree) == []
        assert (fresh.files, fresh.bytes) == (len(expected), sum(len(content) for _, content in expected.values()))
        if fresh.commit is not None:
            assert home.exported(fresh.commit) == expected
        captured = fresh
        taken.append((fresh.tree, expected))
    here = taken[-1][0]
    for tree, expected in chance.sample(taken, 3):
        changes = {each.path: (each.what, each.kind) for each in contents.compare(home.git, here, tree)}
        assert changes == plain_comparison(visible(home.top), expected)
        kept = {path: each for path, each in content_of(home.top).items() if path not in visible(home.top)}
        before_restore = content_of(home.top)
        try:
            restore(home.source(), here, tree)
        except Refused:  # an ignored file is in the way
            assert content_of(home.top) == before_restore
            assert any(b".log" in path for path in kept)
            continue
        assert content_of(home.top) == expected | kept
        assert home.unsaved(tree) == []
        here = tree
    assert git(home.top, "fsck", "--no-dangling") == ""
