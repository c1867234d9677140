"""Attacks as data: hostile bytes to plant below the root of a repository, and the commands that they are aimed at."""

from __future__ import annotations

import json
import os
import struct
import sys
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from holdfast.trees.manifest import Manifest, write_manifest
from proof.hostile.commands import command_lines, facts_of
from proof.hostile.victim import TRAPPED, Victim, now, read_json, write

Plant = Callable[[Victim], object]


class Attack(NamedTuple):
    """An attack. `aims` are command lines, in the words of `proof.hostile.commands`. If it is to be `refused`, each
    of them must fail."""

    name: str
    plant: Plant
    aims: tuple[str, ...]
    refused: bool = False


def aimed(victim: Victim, aims: tuple[str, ...]) -> list[tuple[str, ...]]:
    """The arguments of each command line, with the ids of this repository."""
    facts = facts_of(victim)
    lines = []
    for line in aims:
        for name, value in {**facts, **paths_of(victim)}.items():
            line = line.replace("{" + name + "}", value)  # noqa: PLW2901
        lines.append(tuple(line.split()))
    return lines


def paths_of(victim: Victim) -> dict[str, str]:
    return {"home": str(victim.home), "trap": str(victim.trap)}


def all_lines(victim: Victim) -> list[tuple[str, ...]]:
    return [each.arguments for each in command_lines(facts_of(victim))]


# --- Records ----------------------------------------------------------------------------------------


def operation(**fields: Any) -> dict[str, Any]:
    """A pending operation of a dead process."""
    return {
        "operation_id": "00000000000000bb",
        "kind": "remove",
        "worktree_id": "main",
        "begun_at": now(),
        "holder_id": "host:user:1:1",
        **fields,
    }


def plant_operation(victim: Victim, under: str = "main", **fields: Any) -> None:
    write(victim.root / f".jvs/operations/{under}.json", pretty(operation(**fields)))


def change_record(path: Path, **fields: Any) -> None:
    """Change fields of a JSON record."""
    write(path, pretty({**read_json(path), **fields}))


def pretty(value: object) -> str:
    return json.dumps(value, indent=2)


def head_of(victim: Victim, worktree: str = "main") -> str:
    """The head snapshot of a worktree."""
    return str(read_json(victim.root / f".jvs/worktrees/{worktree}/config.json")["head_snapshot_id"])


# --- Trees ------------------------------------------------------------------------------------------


def tree_of(victim: Victim, worktree: str = "main") -> Path:
    return victim.root / ".jvs/snapshots" / head_of(victim, worktree)


def regular_content(path: Path) -> bytes:
    """The content of a small regular file; empty for anything else that another attack has put there."""
    return path.read_bytes() if path.is_file() and path.stat().st_size < 1 << 20 else b""


def forge_manifest(victim: Victim, change: Callable[[dict[bytes, bytes]], Mapping[bytes, bytes]]) -> None:
    """Replace the manifest of main's head by a changed one, and make hashes and records agree with it."""
    tree = tree_of(victim)
    manifest = tree / "manifest"
    bodies = change(dict(Manifest(regular_content(manifest), where=str(manifest)).records()))
    manifest.unlink()
    digest = write_manifest(manifest, bodies.items())
    ready = read_json(tree / ".READY")
    write(tree / ".READY", json.dumps({**ready, "payload_hash": digest}) + "\n")
    change_record(victim.root / f".jvs/descriptors/{tree.name}.json", payload_hash=digest)
    forget_caches(victim)


def forget_caches(victim: Victim) -> None:
    for name in os.listdir(victim.root / ".jvs/cache"):
        (victim.root / ".jvs/cache" / name).unlink()


def forge_shared_directories(victim: Victim, records: Mapping[bytes, tuple[str, bytes]]) -> None:
    """Replace the list of shared directories of main's head: each path, the tree that stores it, and the path there."""
    names = sorted({tree for tree, _ in records.values()})
    content = b"holdfast homes 1\n" + struct.pack("<I", len(names))
    for name in names:
        content += struct.pack("<I", len(name)) + name.encode()
    for path, (tree, there) in records.items():
        content += struct.pack("<III", names.index(tree), len(path), len(there)) + path + there
    tree_path = tree_of(victim)
    write(tree_path / "homes", content + struct.pack("<II", 0xFFFFFFFF, zlib.crc32(content)))
    ready = read_json(tree_path / ".READY")
    write(tree_path / ".READY", json.dumps({**ready, "homes": True}) + "\n")
    forget_caches(victim)


# --- Other kinds of files ---------------------------------------------------------------------------


def clear(path: Path) -> None:
    """Remove whatever is at a path, and make its parents."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.is_dir() and not path.is_symlink():
        for directory, names, files in os.walk(path, topdown=False):
            for name in (*names, *files):
                each = Path(directory, name)
                each.rmdir() if each.is_dir() and not each.is_symlink() else each.unlink()
        path.rmdir()
    elif path.is_symlink() or path.exists():
        path.unlink()


def link(path: Path, target: Path | str) -> None:
    clear(path)
    path.symlink_to(target)


def fifo(path: Path) -> None:
    if sys.platform == "win32":
        raise NotImplementedError
    clear(path)
    os.mkfifo(path)


def directory(path: Path) -> None:
    clear(path)
    path.mkdir()
    (path / "inside").write_text("x")


def huge(path: Path, size: int = 3 << 30) -> None:
    """A file with holes, larger than the memory that a command may use."""
    clear(path)
    with path.open("wb") as file:
        file.truncate(size)


def device(path: Path) -> None:
    """An endless device; needs root."""
    if sys.platform == "win32":
        raise NotImplementedError
    clear(path)
    os.mknod(path, 0o666 | 0o020000, os.makedev(1, 5))


def trapped(victim: Victim) -> Path:
    """The directory in the home that looks like a snapshot or a scratch directory."""
    return victim.trap / TRAPPED
