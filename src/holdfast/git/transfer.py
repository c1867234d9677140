"""Transfer of snapshots between repositories: their form on a remote, pushes and fetches.

On a remote, `refs/holdfast/snapshots/<id>` is a tag: its object is the commit of the snapshot, its message the
descriptor. So a snapshot is there completely or not at all. Fetched snapshots go to `refs/holdfast/incoming/<place>/`
first, and are untrusted: the caller checks them. The user's references, tags and FETCH_HEAD are not touched.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from holdfast.errors import Corrupt, GitFailed, NotFound
from holdfast.fs import durable
from holdfast.fs.directory import Directory
from holdfast.fs.durable import new_mark
from holdfast.git.contents import SNAPSHOTS
from holdfast.git.program import Git
from holdfast.git.snapshots import update_refs
from holdfast.git.worktrees import current_branch

INCOMING = "refs/holdfast/incoming/"
MOST_BYTES = 1 << 20  # of a descriptor on a remote
_HEADER = 1 << 10  # more than a tag has before its message
_TAGGER = "tagger Holdfast <holdfast@localhost>"
_TAG = re.compile(rb"object ([0-9a-f]+)\ntype commit\ntag ([^\n]+)\ntagger [^\n]*\n\n(.*)", re.DOTALL)
_AT_ONCE = 100  # references in one push: they are arguments
_PUSH = "--no-verify --no-follow-tags --recurse-submodules=no --no-signed".split()
_FETCH = "--no-tags --no-write-fetch-head --no-recurse-submodules --no-prune --no-auto-maintenance --refmap=".split()
_ADVICE = ("To ", "hint: ", "error: failed to push some refs", "Please make sure", "and the repository exists")
_SOURCE = re.compile(r"\b[0-9a-f]{40,64} -> ")  # the commit of a push, which is another one at each attempt
_CONNECTING = "url pushurl receivepack uploadpack proxy proxyauthmethod vcs serveroption".split()
_RECEIVING = ("fetch.fsckObjects=true", "fetch.unpackLimit=1", "fetch.writeCommitGraph=false", "core.fsync=all")


class Remote(NamedTuple):
    """A remote of the user's, passed to git under another name (`alias`) and without its refspecs: a push would update
    the references that these track, even those of snapshots here. A relative path starts at `worktree`."""

    name: str
    worktree: Path
    alias: str
    settings: tuple[str, ...]


def remote_named(git: Git, name: str | None, worktree: Path) -> Remote:
    """The remote `name`; by default, that of the branch checked out at `worktree`, or else `origin`."""
    known = git.run("remote").decode().splitlines()
    listed = os.fsdecode(git.run("config", "--list", "-z")).split("\0")
    settings = [(key, value) for key, _, value in (each.partition("\n") for each in listed)]
    if name is None:
        branch = current_branch(git, worktree)
        found = dict(settings).get(f"branch.{branch}.remote")
        name = found if found in known else "origin"
    if name not in known:
        text = f"The remotes are: {', '.join(known)}." if known else "There are none."
        raise NotFound(f"there is no remote {name}", hint=f"{text} Add one with 'git remote add'.", remote=name)
    alias = f"holdfast-{new_mark()}"
    kept = [(key.rpartition(".")[2], value) for key, value in settings if key.rpartition(".")[0] == f"remote.{name}"]
    return Remote(
        name, worktree, alias, tuple(f"remote.{alias}.{key}={value}" for key, value in kept if key in _CONNECTING)
    )


def _ask(git: Git, remote: Remote, *words: str, **more: Any) -> bytes:
    try:
        return git.run(*words, worktree=remote.worktree, settings=(*_RECEIVING, *remote.settings), **more)
    except GitFailed as failure:
        told = str(failure.facts["stderr"]).replace(remote.alias, remote.name)
        lines = (_SOURCE.sub("", line.strip()) for line in told.splitlines())
        why = [each for each in lines if each and not each.startswith(_ADVICE)]
        status, command = failure.facts["status"], [each.replace(remote.alias, remote.name) for each in words]
        message = f"git {words[0]} failed for the remote {remote.name}: {'; '.join(why) or f'status {status}'}"
        raise GitFailed(message, remote=remote.name, command=command, status=status, stderr=told) from failure


def advertised(git: Git, remote: Remote) -> dict[str, str | None]:
    """The references of snapshots on a remote, by the part after their prefix, which may be any text; each with its
    commit, or None if it is not a tag."""
    found: dict[str, str | None] = {}
    words = "ls-remote", "--quiet", "--", remote.alias, f"{SNAPSHOTS}*"
    told = _ask(git, remote, *words)
    for line in told.decode(errors="replace").splitlines():
        oid, _, name = line.partition("\t")
        if name.startswith(SNAPSHOTS):
            name, _, peeled = name.removeprefix(SNAPSHOTS).partition("^")
            found[name] = oid if peeled else None
    return found


def make_tag(git: Git, objects: Path, snapshot_id: str, commit: str, at: int, text: bytes) -> str:
    """Write the tag of a snapshot to a private object directory: nothing keeps it from git's garbage collection."""
    head = f"object {commit}\ntype commit\ntag {snapshot_id}\n{_TAGGER} {max(at, 0)} +0000\n\n"
    return git.run("mktag", objects=objects, content=head.encode() + text + b"\n").decode().strip()


def push(git: Git, remote: Remote, tags: Mapping[str, str], objects: Path) -> None:
    """Create these tags on a remote. Raises `GitFailed` instead of replacing one that exists by now."""
    pairs = list(tags.items())
    for first in range(0, len(pairs), _AT_ONCE):
        some = pairs[first : first + _AT_ONCE]
        leases = [f"--force-with-lease={SNAPSHOTS}{each}:" for each, _ in some]
        refspecs = [f"{oid}:{SNAPSHOTS}{each}" for each, oid in some]
        words = "push", "--quiet", *_PUSH, *leases, "--", remote.alias, *refspecs
        _ask(git, remote, *words, objects=objects)


def fetch(git: Git, remote: Remote, snapshot_ids: Iterable[str], place: str) -> None:
    """Fetch snapshots to a place of their own below `refs/holdfast/incoming/`. git checks every object on arrival.
    Durable when this returns."""
    refspecs = "".join(f"+{SNAPSHOTS}{each}:{INCOMING}{place}/{each}\n" for each in snapshot_ids)
    words = "fetch", "--quiet", *_FETCH, "--stdin", "--", remote.alias
    _ask(git, remote, *words, content=refspecs.encode(), private=True)
    with Directory.open(git.objects / "pack") as directory:
        durable.sync_names(directory)


def fetch_from(git: Git, source: Path, wanted: Mapping[str, str]) -> None:
    """Fetch references from a repository on this machine that Holdfast made. `wanted` maps their names here, which
    are overwritten, to those there. git checks every object on arrival. Durable when this returns."""
    refspecs = "".join(f"+{there}:{here}\n" for here, there in wanted.items())
    settings = (*_RECEIVING, "protocol.file.allow=always")
    words = "fetch", "--quiet", *_FETCH, "--update-head-ok", "--stdin", "--", os.fspath(source)
    git.run(*words, content=refspecs.encode(), settings=settings)
    with Directory.open(git.objects / "pack") as directory:
        durable.sync_names(directory)


# --- Branches that work lands on -----------------------------------------------------------------------


def fetch_branch(git: Git, remote: Remote, branch: str, ref: str) -> str:
    """Fetch a branch of a remote to a reference of ours, and return its commit; `NotFound` if it does not exist."""
    words = "fetch", "--quiet", *_FETCH, "--", remote.alias, f"+refs/heads/{branch}:{ref}"
    try:
        _ask(git, remote, *words)
    except GitFailed as failure:
        if "couldn't find remote ref" in str(failure.facts["stderr"]):
            raise NotFound(f"{remote.name} has no branch {branch}", branch=branch, remote=remote.name) from failure
        raise
    return git.run("rev-parse", "--verify", ref).decode().strip()


def push_branch(git: Git, remote: Remote, branch: str, commit: str, *, expected: str) -> None:
    """Move a branch of a remote from exactly `expected` ("": it must not exist) to a commit; else raise `GitFailed`."""
    lease = f"--force-with-lease=refs/heads/{branch}:{expected}"
    _ask(git, remote, "push", "--quiet", *_PUSH, lease, "--", remote.alias, f"{commit}:refs/heads/{branch}")


def push_ref(git: Git, remote: Remote, ref: str, commit: str) -> None:
    """Set a reference of ours on a remote to a commit; with an empty one, delete it there."""
    _ask(git, remote, "push", "--quiet", *_PUSH, "--force", "--", remote.alias, f"{commit}:{ref}")


def fetch_ref(git: Git, remote: Remote, ref: str) -> None:
    """Fetch a reference of ours from a remote, under the same name."""
    _ask(git, remote, "fetch", "--quiet", *_FETCH, "--", remote.alias, f"+{ref}:{ref}")


def incoming(git: Git) -> dict[str, dict[str, str]]:
    """The fetched tags, by place and id."""
    found: dict[str, dict[str, str]] = {}
    for line in git.run("for-each-ref", "--format=%(objectname) %(refname)", INCOMING).decode().splitlines():
        oid, _, name = line.partition(" ")
        place, _, snapshot_id = name.removeprefix(INCOMING).partition("/")
        found.setdefault(place, {})[snapshot_id] = oid
    return found


def forget_incoming(git: Git, place: str) -> None:
    if found := incoming(git).get(place):
        update_refs(git, "".join(f"delete {INCOMING}{place}/{each} {oid}\n" for each, oid in found.items()))


class Tag(NamedTuple):
    """A fetched tag: the commit of a snapshot, the id in the tag, and the text of the descriptor."""

    commit: str
    snapshot_id: str
    text: bytes


def read_tag(git: Git, oid: str) -> Tag:
    """Read a fetched tag; raise `Corrupt` if it is not that of a snapshot, or too large for a descriptor."""
    question = "cat-file", "--batch-check=%(objecttype) %(objectsize)"
    kind, size = git.run(*question, content=f"{oid}\n".encode()).decode().split()
    if kind != "tag":
        raise Corrupt(f"it is a {kind}, not a tag")
    if int(size) > MOST_BYTES + _HEADER:
        raise Corrupt(f"its tag has {size} bytes, more than a descriptor may have")
    match = _TAG.fullmatch(git.run("cat-file", "tag", oid))
    if match is None:
        raise Corrupt("its tag is not that of a snapshot")
    return Tag(match[1].decode(), match[2].decode(errors="replace"), match[3].removesuffix(b"\n"))
