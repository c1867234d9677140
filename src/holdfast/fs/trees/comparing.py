"""What is different between a directory and a snapshot, or between two snapshots, from their manifests."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

from holdfast.fs import calls
from holdfast.fs.trees.descent import Descent
from holdfast.fs.trees.intake import Intake
from holdfast.fs.trees.manifest import Manifest, ManifestEntry, decode_entry, directory_of, raw_entries
from holdfast.fs.trees.scout import Scout
from holdfast.fs.trees.stat_cache import StatCache
from holdfast.fs.trees.tally import Tally

Records = Iterator[tuple[bytes, bytes]]


class Change(NamedTuple):
    """One difference. `what` is `added`, `removed` or `modified`; `aspects` say in what respect.

    Aspects: `kind`, `content`, `mode`, `owner`, `mtime`, `target`, `device`, `xattrs`, `links`.
    """

    path: bytes
    what: str
    kind: str
    aspects: tuple[str, ...] = ()
    size: int = 0


def compare(tree_a: Path, tree_b: Path) -> Iterator[Change]:
    """What is different in the second tree, in the order of the paths' parts."""
    yield from _compare(Manifest.read(tree_a).records(), Manifest.read(tree_b).records())


def changes(source: Path, tree: Path | None, *, cache: Path | None = None) -> Iterator[Change]:
    """What is different in a directory from what the snapshot holds; without one, all of it is added.

    Files that the cache of the directory's last capture knows are not read.
    """
    records: Records = iter(()) if tree is None else Manifest.read(tree).records()
    with ExitStack() as stack:
        way = stack.enter_context(Descent(source))
        scout = Scout.start(way, cache, None)
        if scout is not None:
            stack.enter_context(scout)
        yield from _compare(records, _scan(way, cache, scout))


def _scan(way: Descent, cache: Path | None, scout: Scout | None) -> Records:
    device = calls.fstat(way.enter("")).st_dev
    known = StatCache.read(cache, device)
    if scout is not None:
        scout.use(known)
    intake = Intake(way, cache=known, tally=Tally(), scout=scout)
    for taken in intake.take_all():
        yield taken.encoded, taken.body


def _compare(old: Records, new: Records) -> Iterator[Change]:
    """Merge two sequences of directories; equal ones are skipped as a whole."""
    one, other = next(old, None), next(new, None)
    while one is not None or other is not None:
        order = _order(one, other)
        if order == 0 and one is not None and other is not None:
            if one[1] != other[1]:
                yield from _compare_directories(one[0], one[1], other[1])
            one, other = next(old, None), next(new, None)
        elif order < 0 and one is not None:
            yield from _all(one, "removed")
            one = next(old, None)
        elif other is not None:
            yield from _all(other, "added")
            other = next(new, None)


def _order(one: tuple[bytes, bytes] | None, other: tuple[bytes, bytes] | None) -> int:
    if one is None or other is None:
        return 1 if one is None else -1
    mine, yours = one[0].split(b"/"), other[0].split(b"/")
    if one[0] == other[0]:
        return 0
    return -1 if not one[0] or (other[0] and mine < yours) else 1


def _all(record: tuple[bytes, bytes], what: str) -> Iterator[Change]:
    path, body = record
    yield Change(path, what, directory_of(path, body).kind)
    for raw in raw_entries(body).values():
        entry = decode_entry(path, raw)
        yield Change(entry.path, what, entry.kind, size=entry.size)


def _compare_directories(path: bytes, old: bytes, new: bytes) -> Iterator[Change]:
    aspects = _aspects(directory_of(path, old), directory_of(path, new))
    if aspects:
        yield Change(path, "modified", "d", aspects)
    before, after = raw_entries(old), raw_entries(new)
    for name in sorted(before.keys() | after.keys()):
        one, other = before.get(name), after.get(name)
        if one == other:
            continue
        if one is None or other is None:
            entry = decode_entry(path, other or one or b"")
            yield Change(entry.path, "added" if one is None else "removed", entry.kind, size=entry.size)
        else:
            entry = decode_entry(path, other)
            yield Change(
                entry.path, "modified", entry.kind, _aspects(decode_entry(path, one), entry), entry.size
            )


def _aspects(old: ManifestEntry, new: ManifestEntry) -> tuple[str, ...]:
    found = {
        "kind": old.kind != new.kind,
        "content": (old.size, old.sha256) != (new.size, new.sha256) and old.kind == new.kind,
        "mode": old.mode != new.mode,
        "owner": (old.uid, old.gid) != (new.uid, new.gid),
        "mtime": old.mtime_ns != new.mtime_ns,
        "target": old.target != new.target,
        "device": old.device != new.device,
        "xattrs": old.xattrs != new.xattrs,
        "links": old.first_link != new.first_link,
    }
    return tuple(aspect for aspect, different in found.items() if different)
