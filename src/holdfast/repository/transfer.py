"""Transfer of snapshots between machines: pushing them to a git remote, and fetching them.

Nothing that comes from a remote is trusted (decision 0012). The steps of a fetch:

1. Ask the remote which snapshots it has; leave out those that are here. If only the descriptor of one is here, because
   machines share the records or because the content was lost, fetch the content.
2. git fetches them to references of this fetch alone, below `refs/holdfast/incoming/`.
3. Check each: id, descriptor, and that the commit has the tree which the descriptor names.
4. For each, parents first: the reference `refs/holdfast/snapshots/<id>`; then one transaction with the descriptor, a
   pin, and the audit entry. **Commit point.** No head moves.
5. Delete the references of step 2.

A kill leaves references of step 2, and perhaps one of step 4 without a descriptor. The next fetch deletes the former
and uses or replaces the latter, and so does `doctor --fix`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from holdfast.clock import LONGEST_DURATION, format_instant, parse_instant, ttl_within
from holdfast.errors import AlreadyExists, Corrupt, Failure, GitFailed, NotFound, Refused
from holdfast.fs.directory import make_directories
from holdfast.fs.names import checked_text
from holdfast.git import transfer
from holdfast.repository import payloads
from holdfast.repository.context import DESCRIPTORS, PINS, Descriptor, Pin, RepositoryContext
from holdfast.repository.git_home import GitHome
from holdfast.repository.git_snapshots import ENGINE
from holdfast.repository.history import is_snapshot_id, snapshot_not_found
from holdfast.repository.payloads import Scratch, scratch
from holdfast.repository.snapshots import published_tree
from holdfast.repository.worktree_changes import KEEP_FOR
from holdfast.store.model import Change, Create, Decision, Key, Stream, StructCodec, View

if TYPE_CHECKING:
    from holdfast.repository.content import Contents

_CODEC: StructCodec[Descriptor] = StructCodec(Descriptor, pretty=False, limit=transfer.MOST_BYTES)
_OTHER = "another snapshot has this id here"
_LARGEST = 1 << 62  # of a number of files or bytes
_HERE_ALONE = {"doomed_by": None, "lock_id": None, "fencing_token": None, "clone": msgspec.UNSET}
"""The fields of a descriptor that mean something on one machine only."""


class Pushed(NamedTuple):
    """The snapshots that were pushed, and those that the remote already had."""

    remote: str
    pushed: tuple[str, ...]
    known: tuple[str, ...]


class FetchResult(NamedTuple):
    """The snapshots that were fetched, and those that were already here."""

    remote: str
    fetched: tuple[Descriptor, ...]
    known: tuple[str, ...]


def push(
    context: RepositoryContext, remote: str | None, snapshot_ids: Collection[str] | None, *, worktree: str
) -> Pushed:
    """Copy snapshots to a remote: these, or all. Without a remote, to that of the worktree's branch, else `origin`; in
    a plain home, to the content store.

    Raises `AlreadyExists`, and pushes nothing, if the remote has another snapshot with the same id.
    """
    if (contents := context.home.contents) is not None:
        return _send(contents, remote, snapshot_ids)
    home = _git_home(context)
    found = transfer.remote_named(home.git, remote, home.paths.payload(worktree))
    asked = [name for name, _ in context.store.scan(DESCRIPTORS)] if snapshot_ids is None else list(snapshot_ids)
    with scratch(context, "push", uses=asked) as room:
        wanted = dict(_complete(context, home, asked, every=snapshot_ids is not None))
        there = transfer.advertised(home.git, found)
        _refuse_others(home, found.name, wanted, there)
        objects = room.path / "objects"
        make_directories(objects)
        tags = {each: _tag(home, descriptor, objects) for each, descriptor in wanted.items() if each not in there}
        try:
            transfer.push(home.git, found, tags, objects)
        except GitFailed:
            there = transfer.advertised(home.git, found)
            _refuse_others(home, found.name, wanted, there)
            if not tags.keys() <= there.keys():
                raise  # else another process pushed the same ones
    return Pushed(found.name, tuple(tags), tuple(each for each in wanted if each not in tags))


def _send(contents: Contents, remote: str | None, snapshot_ids: Collection[str] | None) -> Pushed:
    """Send snapshots whose trees are here to the content store. Those that are named are sent even if they should be
    there, in case the store has lost them."""
    context, address = contents.context, _content_of(contents, remote)
    asked = [name for name, _ in context.store.scan(DESCRIPTORS)] if snapshot_ids is None else list(snapshot_ids)
    pushed = []
    for each in asked:
        with scratch(context, "push", uses=[each]):
            if context.home.is_here(each) and contents.send_existing(each, again=snapshot_ids is not None):
                pushed.append(each)
    return Pushed(address, tuple(pushed), tuple(each for each in asked if each not in pushed))


def _content_of(contents: Contents, remote: str | None) -> str:
    if remote not in (None, contents.address):
        hint = "Leave out the remote."
        raise Refused(f"snapshots of this repository are sent to {contents.address}, not to a git remote", hint=hint)
    return contents.address


def _git_home(context: RepositoryContext) -> GitHome:
    if not isinstance(context.home, GitHome):
        hint = "To move one, export it: 'holdfast export ID DIR'."
        raise Refused("snapshots are transferred by git, but this repository is not in a git checkout", hint=hint)
    return context.home


def _complete(
    context: RepositoryContext, home: GitHome, asked: Collection[str], *, every: bool
) -> Iterator[tuple[str, Descriptor]]:
    """The snapshots that are visible and are not being deleted; with `every`, raise for any other."""
    for each in asked:
        found = context.descriptor(each)
        if found is not None and found.doomed_by is None and home.is_ready(each):
            yield each, found
        elif every:
            raise snapshot_not_found(each)


def _refuse_others(
    home: GitHome, remote: str, wanted: Mapping[str, Descriptor], there: Mapping[str, str | None]
) -> None:
    for each in wanted:
        if each in there and there[each] != home.commit(each):
            message = f"{remote} has another snapshot with the id {each}; nothing was replaced"
            hint = f"Look at it: 'git ls-remote {remote}'. A snapshot never changes, so one of the two is not genuine."
            raise AlreadyExists(message, hint=hint, snapshot_id=each, remote=remote, commit=there[each])


def _tag(home: GitHome, descriptor: Descriptor, objects: Path) -> str:
    sent = msgspec.structs.replace(descriptor, **_HERE_ALONE, fetched_from=msgspec.UNSET)
    at = int(parse_instant(sent.created_at))
    commit = home.commit(sent.snapshot_id)
    return transfer.make_tag(home.git, objects, sent.snapshot_id, commit, at, _CODEC.encode(sent))


# --- Fetching ------------------------------------------------------------------------------------------


def fetch(
    context: RepositoryContext,
    remote: str | None,
    snapshot_ids: Collection[str] | None,
    *,
    worktree: str,
    keep_for: float = KEEP_FOR,
) -> FetchResult:
    """Copy snapshots from a remote: these, or all that are not here. A pin keeps each for `keep_for` seconds.

    Raises `Refused` at the end if a snapshot cannot be accepted; the others have been fetched by then.
    """
    ttl_within(keep_for, 0.0, LONGEST_DURATION, setting="keep_for")
    if (contents := context.home.contents) is not None:
        return _receive(contents, remote, snapshot_ids)
    home = _git_home(context)
    found = transfer.remote_named(home.git, remote, home.paths.payload(worktree))
    with scratch(context, "fetch") as room:
        sweep_incoming(context, home)
        there = transfer.advertised(home.git, found)  # 1
        if snapshot_ids is not None:
            there = {each: there[each] for each in _on_remote(found.name, snapshot_ids, there)}
        refused = {each: why for each, commit in there.items() if (why := _mismatch(context, home, each, commit))}
        known = [each for each in there if each not in refused and not _is_wanted(context, home, each)]
        wanted = there.keys() - refused.keys() - set(known)
        fetched: list[Descriptor] = []
        try:
            if wanted:
                transfer.fetch(home.git, found, sorted(wanted), room.scratch_id)  # 2
                fetched = list(_accept(context, home, room, found.name, refused, keep_for))
        finally:
            transfer.forget_incoming(home.git, room.scratch_id)  # 5
    if refused:
        raise _not_accepted(found.name, refused, fetched)
    return FetchResult(found.name, tuple(fetched), tuple(known))


def _receive(contents: Contents, remote: str | None, snapshot_ids: Collection[str] | None) -> FetchResult:
    """Fetch snapshots whose trees are not here from the content store. They have descriptors already."""
    context, address = contents.context, _content_of(contents, remote)
    there = {name: document.record for name, document in context.store.scan(DESCRIPTORS)}
    asked = there if snapshot_ids is None else list(_on_remote(address, snapshot_ids, dict.fromkeys(there)))
    missing = [each for each in asked if not context.home.is_here(each) and there[each].content]
    for each in missing:
        contents.fetch(each)
    return FetchResult(address, tuple(map(there.__getitem__, missing)), tuple(set(asked) - set(missing)))


def sweep_incoming(context: RepositoryContext, home: GitHome) -> list[str]:
    """Delete the references that fetches of dead processes left; return the ids of these fetches."""
    places = transfer.incoming(home.git)  # first: a place is in use before it has references
    dead = sorted(places.keys() - {each.scratch_id for each in payloads.in_use(context.paths)})
    for each in dead:
        transfer.forget_incoming(home.git, each)
    return dead


def _on_remote(remote: str, names: Collection[str], there: Mapping[str, object]) -> Iterator[str]:
    """The ids on the remote that begin with these names."""
    for name in names:
        found = [each for each in there if each.startswith(name) and is_snapshot_id(each)]
        if len(found) != 1:
            many = f"{len(found)} snapshots that begin with" if found else "no snapshot"
            raise NotFound(f"{remote} has {many} {name}", hint=f"List them: 'git ls-remote {remote}'.", name=name)
        yield found[0]


def _is_wanted(context: RepositoryContext, home: GitHome, snapshot_id: str) -> bool:
    """Whether a snapshot is not here, or only its descriptor is, which machines may share on a server."""
    found = context.descriptor(snapshot_id)
    return found is None or not (found.doomed_by or home.is_ready(snapshot_id))


def _mismatch(context: RepositoryContext, home: GitHome, snapshot_id: str, commit: str | None) -> str:
    """Why a reference on a remote cannot be a snapshot to accept; empty if it can."""
    if not is_snapshot_id(snapshot_id):
        return "it is not the id of a snapshot"
    if commit is None:
        return "its reference is not a tag"
    if context.descriptor(snapshot_id) is not None and home.is_ready(snapshot_id):
        return "" if home.commit(snapshot_id) == commit else _OTHER
    return ""


def _accept(
    context: RepositoryContext,
    home: GitHome,
    room: Scratch,
    remote: str,
    refused: dict[str, str],
    keep_for: float,
) -> Iterator[Descriptor]:
    """Steps 3 and 4; what cannot be accepted is added to `refused`."""
    found: dict[str, tuple[str, Descriptor]] = {}
    for snapshot_id, oid in transfer.incoming(home.git).get(room.scratch_id, {}).items():
        try:
            commit, sent = _checked(home, snapshot_id, oid, remote)  # 3
            known = context.descriptor(snapshot_id)
            if known is not None and known.payload_hash != sent.payload_hash:
                raise Corrupt(_OTHER)
            found[snapshot_id] = commit, sent
        except Failure as failure:
            refused[snapshot_id] = failure.message
    for each in _parents_first({name: descriptor for name, (_, descriptor) in found.items()}):
        commit, descriptor = found[each]
        published = _publish(context, home, commit, descriptor, keep_for)  # 4
        if published is not None:
            yield published


def _checked(home: GitHome, snapshot_id: str, oid: str, remote: str) -> tuple[str, Descriptor]:
    """The commit and the descriptor of a fetched snapshot; raises a `Failure` if it is not valid."""
    tag = transfer.read_tag(home.git, oid)
    sent = _CODEC.decode(tag.text, "its descriptor")
    if not tag.snapshot_id == sent.snapshot_id == snapshot_id:
        raise Corrupt(f"its tag is that of {tag.snapshot_id[:64]!a}, its descriptor that of {sent.snapshot_id}")
    if sent.engine != ENGINE or not (0 <= sent.files < _LARGEST and 0 <= sent.bytes < _LARGEST):
        raise Corrupt("its descriptor is not that of a snapshot of a git checkout")
    for each in (sent.note, sent.holder_id):
        checked_text(each, what="text in its descriptor")
    tree = home.tree(tag.commit)
    if tree != sent.payload_hash:
        raise Corrupt(f"its commit has the tree {tree}, not that of its descriptor")
    return tag.commit, msgspec.structs.replace(sent, **_HERE_ALONE, fetched_from=remote)


def _parents_first(found: Mapping[str, Descriptor]) -> Iterator[str]:
    done: set[str] = set()
    for each in found:
        line: dict[str, None] = {}
        here: str | None = each
        while here is not None and here in found and here not in done and here not in line:
            line[here] = None
            here = found[here].parent_id
        yield from reversed(line)
        done.update(line)


def _publish(
    context: RepositoryContext, home: GitHome, commit: str, descriptor: Descriptor, keep_for: float
) -> Descriptor | None:
    """Commit point of a fetched snapshot; None if another fetch has published it meanwhile.

    A scratch directory with its id keeps away other fetches, and `doctor`, which would see the reference as a leftover.
    """
    snapshot_id = descriptor.snapshot_id
    with scratch(context, "fetch", scratch_id=snapshot_id) as room:
        if not _is_wanted(context, home, snapshot_id):
            return None
        home.take_back(room, snapshot_id)  # left by a killed process; the incoming reference keeps the content
        home.note_commit(room, commit)
        with published_tree(context, room, snapshot_id):
            return _commit(context, descriptor, keep_for)


def _commit(context: RepositoryContext, sent: Descriptor, keep_for: float) -> Descriptor:
    key, pin_key = DESCRIPTORS.key(sent.snapshot_id), PINS.key(sent.snapshot_id)
    keys: list[Key[Any] | Stream[Any]] = [key, pin_key, context.trail.stream]
    if sent.parent_id is not None:
        keys.append(DESCRIPTORS.key(sent.parent_id))

    def decide(view: View, now: float) -> Decision[Descriptor]:
        known = view.get(key)
        if known is not None:
            return Decision([context.audit(view, now, "snapshot_fetched", **_facts(sent))], known)
        parent = view.get(DESCRIPTORS.key(sent.parent_id)) if sent.parent_id else None
        is_there = parent is not None and parent.doomed_by is None
        made = msgspec.structs.replace(sent, parent_id=sent.parent_id if is_there else None, clone=context.clone)
        changes: list[Change] = [Create(key, made)]
        until = format_instant(now + keep_for) if keep_for else None
        if until is not None and view.get(pin_key) is None:
            reason = f"fetched from {sent.fetched_from}"
            pin = Pin(pin_id=sent.snapshot_id, snapshot_id=sent.snapshot_id, created_at=format_instant(now))
            pin = msgspec.structs.replace(pin, reason=reason, until=until, holder_id=context.holder.holder_id)
            changes.append(Create(pin_key, pin))
        facts = {**_facts(made), "pinned_until": until}
        return Decision([*changes, context.audit(view, now, "snapshot_fetched", **facts)], made)

    return context.store.transact(keys, decide).result


def _facts(fetched: Descriptor) -> dict[str, object]:
    facts: dict[str, object] = {"snapshot_id": fetched.snapshot_id, "parent_id": fetched.parent_id}
    facts |= {"worktree_id": fetched.worktree_id, "payload_hash": fetched.payload_hash}
    return facts | {"remote": fetched.fetched_from}


def _not_accepted(remote: str, refused: Mapping[str, str], fetched: Collection[Descriptor]) -> Refused:
    first, why = next(iter(refused.items()))
    more = f", and {len(refused) - 1} more" if len(refused) > 1 else ""
    return Refused(
        f"{remote} has a snapshot that was not accepted, {first[:64]!a}: {why}{more}",
        hint="Anyone who can write to the remote can put anything there. Delete it there, or name those to fetch.",
        remote=remote,
        refused={each[:64]: text for each, text in refused.items()},
        fetched=[each.snapshot_id for each in fetched],
    )
