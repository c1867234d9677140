"""Attacks by trees: manifests and lists of shared directories with names that lead out, and strange payloads."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from holdfast.trees.manifest import Meta, encode_body, encode_entry, encode_extras, raw_entries
from proof.hostile.victim import TRAPPED, Victim, write
from tests.attacks.planting import (
    Attack,
    directory,
    fifo,
    forge_manifest,
    forge_shared_directories,
    link,
    tree_of,
)

USING = (
    "export head {out}/exported",
    "restore head restored",
    "worktree create made --from head",
    "restore head --inplace --reason x",
    "verify --all",
    "diff v1 head --patch",
    "show head --files",
    "status",
    "snapshot -m x",
    "doctor --fix",
    "gc plan",
)

_FILE, _DIRECTORY = Meta(b"f", 0o644, 0, 0, 0), Meta(b"d", 0o755, 0, 0, 0)
_EMPTY = bytes.fromhex("e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855")
Bodies = dict[bytes, bytes]


def _hostile_names(victim: Victim) -> dict[str, bytes]:
    home = os.fsencode(victim.home)
    return {
        "upwards": b"../../../../../home/planted",
        "absolute": home + b"/planted",
        "empty": b"",
        "a dot": b".",
        "two dots": b"..",
        "with a slash": b"src/../../x",
        "with a NUL": b"a\0b",
        "very long": b"x" * 5000,
    }


_NAMES = ("upwards", "absolute", "empty", "a dot", "two dots", "with a slash", "with a NUL", "very long")


def manifests() -> Iterator[Attack]:
    for name in _NAMES:
        yield Attack(f"a manifest with a file that is {name}", _with_file(name), USING)
        yield Attack(f"a manifest with a link that is {name}", _with_link(name), USING)
        yield Attack(f"a manifest with a directory that is {name}", _with_directory(name), USING)
        yield Attack(f"a manifest with a hard link to a path that is {name}", _with_hard_link(name), USING)
        yield Attack(f"a shared directory stored at a path that is {name}", _shared_at(name), USING)
        yield Attack(f"a shared directory whose path is {name}", _shared_as(name), USING)


def _with_entry(make: Callable[[Victim], bytes]) -> Callable[[Victim], None]:
    def plant(victim: Victim) -> None:
        def change(bodies: Bodies) -> Mapping[bytes, bytes]:
            entries = [*raw_entries(bodies[b""]).values(), make(victim)]
            return {**bodies, b"": encode_body(_DIRECTORY, b"", entries)}

        forge_manifest(victim, change)

    return plant


def _with_file(name: str) -> Callable[[Victim], None]:
    return _with_entry(lambda victim: encode_entry(_FILE, _hostile_names(victim)[name], 0, _EMPTY))


def _with_link(name: str) -> Callable[[Victim], None]:
    def make(victim: Victim) -> bytes:
        extras = encode_extras(target=os.fsencode(victim.letter))
        return encode_entry(_FILE._replace(kind=b"l"), _hostile_names(victim)[name], 0, b"", extras)

    return _with_entry(make)


def _with_hard_link(name: str) -> Callable[[Victim], None]:
    """A further name of a sentinel: linking it would let the attacker write through it."""

    def make(victim: Victim) -> bytes:
        paths = {**_hostile_names(victim), "absolute": os.fsencode(victim.letter)}
        first = paths[name].replace(b"planted", b"docs/letter")
        return encode_entry(_FILE, b"linked", 0, _EMPTY, b"H" + len(first).to_bytes(4, "little") + first)

    return _with_entry(make)


def _with_directory(name: str) -> Callable[[Victim], None]:
    def plant(victim: Victim) -> None:
        inside = [encode_entry(_FILE, b"file", 0, _EMPTY)]
        where = _hostile_names(victim)[name]
        forge_manifest(victim, lambda bodies: {**bodies, where: encode_body(_DIRECTORY, b"", inside)})

    return plant


def _shared_at(name: str) -> Callable[[Victim], None]:
    def plant(victim: Victim) -> None:
        there = _hostile_names(victim)[name].replace(b"planted", b"docs")
        forge_shared_directories(victim, {b"src": (_other_tree(victim), there)})

    return plant


def _shared_as(name: str) -> Callable[[Victim], None]:
    def plant(victim: Victim) -> None:
        forge_shared_directories(victim, {_hostile_names(victim)[name]: (_other_tree(victim), b"src")})

    return plant


def _other_tree(victim: Victim) -> str:
    return next(each for each in os.listdir(victim.root / ".jvs/snapshots") if each != tree_of(victim).name)


# --- Payloads and retained directories --------------------------------------------------------------


def _linked_tree(victim: Victim) -> None:
    link(tree_of(victim), victim.trap / TRAPPED)


def _linked_payload(victim: Victim) -> None:
    link(tree_of(victim) / "payload", victim.home / "docs")


def _linked_directory(victim: Victim) -> None:
    """The names in the linked directory are those that the manifest expects."""
    link(tree_of(victim) / "payload/src", victim.trap / TRAPPED / "payload")


def _linked_file(victim: Victim) -> None:
    link(tree_of(victim) / "payload/top", victim.letter)


def _linked_remnant(victim: Victim) -> None:
    link(victim.root / ".jvs/remnants" / TRAPPED, victim.trap / TRAPPED)


def _remnant_with_links(victim: Victim) -> None:
    write(victim.root / ".jvs/remnants" / TRAPPED / "payload/src/x", "x")
    link(victim.root / ".jvs/remnants" / TRAPPED / "payload/docs", victim.home / "docs")
    link(victim.root / ".jvs/remnants" / TRAPPED / "times", victim.letter)


def _needed_upwards(victim: Victim) -> None:
    """The list of a tree that claims to need a directory outside, while the rest of a remnant is trimmed."""
    _remnant_with_links(victim)
    forge_shared_directories(victim, {b"src": (TRAPPED, b"../../../../home/trap"), b"deep": (TRAPPED, b"..")})


def _forged_times(victim: Victim) -> None:
    _remnant_with_links(victim)
    above = b"../../../../../home/docs"
    write(victim.root / ".jvs/remnants" / TRAPPED / "times", json.dumps({above.hex(): "1"}))
    forge_shared_directories(victim, {b"src": (TRAPPED, above)})


def _tree_of_fifos(victim: Victim) -> None:
    for name in ("payload/top", "manifest", ".READY"):
        fifo(tree_of(victim) / name)


def _unknown_tree(victim: Victim) -> None:
    """A tree without a descriptor, whose parts are links: the doctor retires or quarantines it."""
    tree = victim.root / ".jvs/snapshots/00000000000000cc"
    write(tree / ".READY", "{}")
    link(tree / "payload", victim.home / "docs")
    link(tree / "homes", victim.letter)


def _quarantined_through_a_link(victim: Victim) -> None:
    _unknown_tree(victim)
    link(victim.root / ".jvs/quarantine", victim.trap)


def _worktree_is_a_link(victim: Victim) -> None:
    link(victim.root / "worktrees/spare", victim.home / "docs")


def _main_is_a_link(victim: Victim) -> None:
    link(victim.root / "main", victim.home / "docs")


def _worktree_full_of_links(victim: Victim) -> None:
    for name, target in (("a", victim.letter), ("b", victim.home), ("c", victim.trap), ("d", "d")):
        link(victim.root / "main" / name, target)


def _scratch_with_links(victim: Victim) -> None:
    scratch = victim.root / ".jvs/tmp/00000000000000aa"
    link(scratch / "tree", victim.trap / TRAPPED)
    link(scratch / "intent.json", victim.letter)


def _linked_scratch(victim: Victim) -> None:
    link(victim.root / ".jvs/tmp/00000000000000dd", victim.trap / TRAPPED)
    link(victim.root / ".jvs/tmp/00000000000000dd.swept", victim.home / "docs")


def _swept_link(victim: Victim) -> None:
    link(victim.root / ".jvs/tmp/00000000000000aa.swept", victim.trap / TRAPPED)


def _scratch_lock_is(make: Callable[[Path], None]) -> Callable[[Victim], None]:
    return lambda victim: make(victim.root / ".jvs/tmp/00000000000000aa/lock")


SWEEPING = ("doctor --fix", "snapshot -m x", "gc plan", "gc run --plan {plan}", "restore head restored")
SINGLE = [
    Attack("the tree of a snapshot is a link", _linked_tree, USING),
    Attack("the payload of a snapshot is a link", _linked_payload, USING),
    Attack("a directory of a payload is a link", _linked_directory, USING),
    Attack("a file of a payload is a link", _linked_file, USING),
    Attack("files of a tree are fifos", _tree_of_fifos, USING),
    Attack("a retained tree is a link", _linked_remnant, SWEEPING),
    Attack("a retained tree has links in it", _remnant_with_links, SWEEPING),
    Attack("a list needs directories upwards of a retained tree", _needed_upwards, SWEEPING),
    Attack("times of directories upwards", _forged_times, SWEEPING),
    Attack("a tree of unknown origin has links", _unknown_tree, SWEEPING),
    Attack("the quarantine is a link", _quarantined_through_a_link, SWEEPING),
    Attack(
        "the directory of a worktree is a link",
        _worktree_is_a_link,
        (
            "snapshot --worktree spare",
            "worktree remove spare --force",
            "status --worktree spare",
            "doctor --fix",
            "restore head --inplace --worktree spare --reason x",
            "worktree rename spare other",
        ),
    ),
    Attack(
        "main is a link",
        _main_is_a_link,
        ("snapshot -m x", "status", "diff --patch", "restore head --inplace --reason x", "doctor --fix"),
    ),
    Attack(
        "a worktree has links to everything",
        _worktree_full_of_links,
        ("snapshot -m x", "status", "diff --patch", "restore head --inplace --reason x", "export head {out}/x"),
    ),
    Attack("a scratch directory has links in it", _scratch_with_links, SWEEPING),
    Attack("a scratch directory is a link", _linked_scratch, SWEEPING),
    Attack("a swept scratch directory is a link", _swept_link, SWEEPING),
    Attack("the lock of a scratch directory is a fifo", _scratch_lock_is(fifo), SWEEPING),
    Attack("the lock of a scratch directory is a directory", _scratch_lock_is(directory), SWEEPING),
]

ATTACKS = [*manifests(), *SINGLE]
