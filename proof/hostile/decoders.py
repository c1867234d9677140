"""Every decoder of Holdfast: of records, streams, trees, lock files, requests of hooks and agents, answers of servers.

A decoder here also *uses* what it decoded as commands do: a record whose time is no time decodes as a text, and the
command that reads the time is the one that fails. Only a `Failure` may leave it.
"""

from __future__ import annotations

import contextlib
import io
import os
import struct
import sys
from collections.abc import Callable
from http.client import HTTPException
from pathlib import Path

from holdfast import clock
from holdfast.errors import Failure
from holdfast.fs import names, strictjson
from holdfast.issues import exchange
from holdfast.issues import model as issues
from holdfast.leases.wait_notes import WaitNotes
from holdfast.ledger import log as ledger
from holdfast.ledger.claim_files import ClaimFiles
from holdfast.ledger.projection import ClaimState
from holdfast.locks.identity import Holder
from holdfast.locks.repo_lock import RepoLock
from holdfast.repository import guard
from holdfast.repository.guard import WorktreePath
from holdfast.setup import edits, plan, targets
from holdfast.store import addresses
from holdfast.store import open as stores
from holdfast.trees import shared_dirs
from holdfast.trees.manifest import (
    Manifest,
    Meta,
    decode_entry,
    directory_of,
    encode_body,
    encode_entry,
    raw_entries,
    read_manifest,
    write_manifest,
)
from holdfast.trees.scan import StatCache, write_cache
from holdfast.trees.verify import verify
from proof.hostile.record_decoders import GATE, HOLDER, IDENTITY, ISSUE, LEASE, NOW, Decoder, T, as_json, records

# --- The ledger, locks and notes --------------------------------------------------------------------

_EVENTS: list[dict[str, object]] = [
    {"type": "lock_acquired", "node_id": "1.2", "owner": "a:b", "timestamp": T, "expires_at": T, "claim_id": "c"},
    {"type": "lock_released", "node_id": "1.2", "owner": "a:b", "timestamp": T, "claim_id": "c"},
    {"type": "lock_requested", "node_id": "1.2", "owner": "a:b", "timestamp": T, "ticket": "t", "priority": 1}
    | {"until": T, "holder": {"holder_id": HOLDER}},
    {"type": "lock_withdrawn", "node_id": "1.2", "owner": "a:b", "timestamp": T, "ticket": "t"},
    {"type": "lock_expired", "node_id": "1.2", "owner": "a:b", "timestamp": T, "reaped_by": "x"},
]
_NOTE: dict[str, object] = {
    "ticket": "00aa",
    "kind": "lock",
    "name": "x",
    "place": "/p",
    "since": T,
    "agent": "",
    "actor": "a:b",
    "purpose": "p",
    "proof": "",
    "shared": False,
    "above": [HOLDER],
    "holder_id": HOLDER,
    **IDENTITY,
}


def _fold(content: bytes) -> object:
    """Claims, folded from events that another program may have appended."""
    state = ClaimState()
    for number, line in enumerate(content.split(b"\n"), 1):
        if line:
            state.apply(ledger.Recorded(number, ledger.CODEC.decode(line, "an event")))
    for claim in state.claims.values():
        claim.is_expired(NOW)
        _ = claim.holder
    for queue in state.queues.values():
        for waiter in queue:
            waiter.counts(NOW)
    return state.as_record()


def _appended(content: bytes) -> object:
    return ledger.CODEC.encode(ledger.checked(strictjson.decode(content)))


def _saved(content: bytes) -> object:
    state = ClaimState.from_record(strictjson.decode(content), 1)
    return None if state is None else [each.is_expired(NOW) for each in state.claims.values()]


class Files:
    """A directory whose files hold the input, for decoders that read files."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def decoder(self, name: str, path: str, decode: Callable[[], object], *samples: bytes) -> Decoder:
        file = self.directory / path
        file.parent.mkdir(parents=True, exist_ok=True)

        def write_and_decode(content: bytes) -> object:
            descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            try:
                os.write(descriptor, content)
            finally:
                os.close(descriptor)
            return decode()

        return Decoder(name, write_and_decode, samples)


def in_files(directory: Path) -> list[Decoder]:
    """Decoders that open their files themselves."""
    files = Files(directory)
    root, tree, guarded, stored = directory, directory / "snapshots/00aa", directory / "guarded", directory / "stored"
    (tree / "payload").mkdir(parents=True)
    manifest, homes = _sample_manifest(directory), _sample_shared_directories(directory)
    place = WorktreePath(os.fspath(guarded), "main")
    checkpoint = _sample_checkpoint(directory)
    lock = RepoLock(root)
    record = {"pid": 1, "created_at": T, "cmd": "c", "lock_id": "l", "holder_id": HOLDER, **IDENTITY}
    claim = {"node_id": "1.2", "owner": "a:b", "acquired_at": T, "expires_at": T, "claim_id": "c"}
    return [
        files.decoder("a manifest", "snapshots/00aa/manifest", lambda: list(read_manifest(tree)), manifest),
        files.decoder("a manifest to verify", "snapshots/00aa/manifest", lambda: list(verify(tree)), manifest),
        files.decoder(
            "a list of shared directories",
            "snapshots/00bb/homes",
            lambda: shared_dirs.read_shared_directories(root / "snapshots/00bb"),
            homes,
        ),
        files.decoder(
            "the mark of a tree", "snapshots/00cc/.READY", lambda: list(verify(root / "snapshots/00cc")), b"{}"
        ),
        files.decoder(
            "a store's address", "stored/.holdfast/config.json", lambda: stores.address_of(stored), _config("files")
        ),
        files.decoder(
            "a lease, for the guard", "guarded/.jvs/locks/main.json", lambda: _guard_answer(place), as_json(LEASE)
        ),
        files.decoder(
            "a lease, for a hook",
            "held/.jvs/locks/other.json",
            lambda: guard.holds_nothing(os.fspath(root / "held"), "x"),
            as_json(LEASE),
        ),
        files.decoder(
            "a checkpoint", checkpoint[0], lambda: ledger.load_checkpoint(root, "claims", "1"), checkpoint[1]
        ),
        files.decoder("a stat cache", "cache/main.stat", lambda: _cached(root), _sample_cache(directory)),
        files.decoder("a wait note", "waits/00aa.json", lambda: _notes(root / "waits"), as_json(_NOTE)),
        files.decoder("a repository lock", "repos/x/.lock", lambda: lock.state("x"), as_json(record)),
        files.decoder("a claim file", "locks/1.2.lock", lambda: _claim_file(root), as_json(claim)),
    ]


def _config(store: str) -> bytes:
    return as_json({"schema_version": 1, "store": store})


def _guard_answer(place: WorktreePath) -> object:
    return guard.quick_check(place, None)


def _notes(directory: Path) -> object:
    return [each.as_wait() for each in WaitNotes([directory]).notes(sweep=False)]


def _claim_file(root: Path) -> object:
    found = ClaimFiles(root).read("1.2")
    return None if found is None else found.is_expired(NOW)


def _sample_manifest(directory: Path) -> bytes:
    file = encode_entry(Meta(b"f", 0o644, 1, 1, 1), b"name", 5, bytes(32))
    linked = encode_entry(Meta(b"l", 0o777, 1, 1, 1), b"link", 0, b"", b"L\x01\0\0\0x")
    body = encode_body(Meta(b"d", 0o755, 1, 1, 1), b"", [file, linked])
    path = directory / "sample"
    with contextlib.suppress(FileNotFoundError):
        path.unlink()
    write_manifest(path, [(b"", body), (b"src", body)])
    return path.read_bytes()


def _sample_shared_directories(directory: Path) -> bytes:
    tree = directory / "sample-tree"
    tree.mkdir(exist_ok=True)
    found = {b"src": shared_dirs.SharedDirectory("00aa", b"src"), b"b": shared_dirs.SharedDirectory("00bb", b"c")}
    with contextlib.suppress(FileNotFoundError):
        (tree / "homes").unlink()
    shared_dirs.write_shared_directories(tree, found.items())
    return (tree / "homes").read_bytes()


def _sample_cache(directory: Path) -> bytes:
    path = directory / "sample-cache"
    write_cache(path, 1, [(b"src", bytes(range(64)), b"body"), (b"", bytes(64), b"other")])
    return path.read_bytes()


def _cached(root: Path) -> object:
    cache = StatCache.read(root / "cache/main.stat", 1)
    return [cache.known(inode) for inode in (0, 1, int.from_bytes(bytes(range(8)), "little"))]


def _sample_checkpoint(directory: Path) -> tuple[str, bytes]:
    ledger.save_checkpoint(directory, ledger.Checkpoint("claims", "1", 3, "e", {"claims": [], "waiters": []}))
    path = next(directory.glob(".holdfast/checkpoints/*.json"))
    return os.fspath(path.relative_to(directory)), path.read_bytes()


def _bodies(content: bytes) -> object:
    """Everything in a manifest, as the restore reads it."""
    manifest = Manifest(content, where="a manifest")
    return [len(manifest), manifest.payload_hash, list(manifest.paths())]


# --- Texts, requests and answers --------------------------------------------------------------------


def _text(function: Callable[[str], object]) -> Callable[[bytes], object]:
    return lambda content: function(content.decode("utf-8", "surrogateescape"))


def _hook(content: bytes) -> object:
    """A request of a coding agent to its hook."""
    from holdfast.cli import quick

    before, sys.stdin = sys.stdin, io.TextIOWrapper(io.BytesIO(content))
    try:
        request = quick.read_request()
    finally:
        sys.stdin = before
    base, paths = quick.working_directory(request or {}), quick.written_paths(request or {})
    return [guard.worktrees_at(base), *(guard.worktrees_of(os.path.join(base, each)) for each in paths or ())]


def _address(text: str) -> object:
    from holdfast.store.addresses import EtcdAddress

    shown = [addresses.without_secrets(text), addresses.has_secrets(text), addresses.advice_about_secrets(text)]
    if text.startswith("etcd"):
        return [*shown, EtcdAddress.parse(text)]
    with contextlib.suppress(ImportError):
        from holdfast.store.postgres_connections import PostgresAddress

        return [*shown, PostgresAddress.parse(text)]
    return shown


def _answer(content: bytes) -> object:
    """An answer of etcd to a request, with any status."""
    from holdfast.store.addresses import EtcdAddress
    from holdfast.store.etcd_gateway import Gateway, GatewayError

    gateway = Gateway(EtcdAddress.parse("etcd://127.0.0.1:1/x"))
    try:
        return gateway._exchange(_Connection(content), "/v3/kv/range", {})  # type: ignore[arg-type]  # noqa: SLF001
    except GatewayError as error:
        return gateway.failure(error)
    except HTTPException:
        return None  # a lost answer: reads are repeated, and the outcome of a commit is looked up


class _Response:
    length = 0

    def __init__(self, content: bytes) -> None:
        self._file = io.BytesIO(content)
        self.status = 200 if len(content) % 2 else 400

    def read(self, most: int = -1) -> bytes:
        return self._file.read(most)

    def getheader(self, name: str, default: str | None = None) -> str | None:
        return "Wed, 01 May 2024 10:00:00 GMT"


class _Connection:
    """A connection to a server that answers everything with the same bytes."""

    host, port = "127.0.0.1", 1

    def __init__(self, content: bytes) -> None:
        self._content = content
        self.sock = None

    def request(self, *arguments: object) -> None:
        pass

    def getresponse(self) -> _Response:
        return _Response(self._content)

    def close(self) -> None:
        pass


def _arguments(content: bytes) -> object:
    """The arguments of every tool of the agent server."""
    from holdfast.mcp import arguments

    given = strictjson.decode(content)
    found: list[object] = []
    for kind in arguments.Arguments.__subclasses__():
        with contextlib.suppress(Failure):
            found.append(arguments.checked(kind, given if isinstance(given, dict) else None))
    return found


def _settings(content: bytes) -> object:
    """Another program's settings, with our entries put in and taken out."""
    parts = [part for part in targets.PARTS[targets.Target.CLAUDE] if isinstance(part, targets.JsonPart)]
    edit = edits.FileEdit(Path("/nowhere/settings.json"), content, content)
    return [plan._edit(part, edit, remove=remove) for part in parts for remove in (False, True)]  # noqa: SLF001


def _marked_block(content: bytes) -> object:
    for comment in (edits.MARKDOWN, edits.HASH):
        edits.without_block(content, comment=comment, where="a file")
        edits.with_block(content, "text", version=3, comment=comment, where="a file")
    return None


def _holder(content: bytes) -> object:
    value = strictjson.decode(content)
    return Holder.from_record(value) if isinstance(value, dict) else None


_BLOCK = b"# Notes\n\n<!-- holdfast:begin v3 alone -->\ntext\n<!-- holdfast:end -->\nrest\n"
_REQUESTS = [
    {"tool_input": {"file_path": "a/b", "command": "*** Update File: x\n"}, "cwd": "/tmp", "workspace_roots": ["/tmp"]},
    {"tool_input": {"path": "x", "input": "*** Move to: y\n"}, "workspace_roots": ["/nowhere"]},
]
_ROW = {"key": "aHQ=", "value": "e30=", "mod_revision": "1", "version": "1"}
_ANSWERS = [{"kvs": [_ROW], "count": "1", "header": {"revision": "1"}}, {"error": "x", "code": 5, "message": "m"}]
_TOOLS = [
    {"worktree": "main", "ttl": "5m", "wait": "0s", "purpose": "p", "priority": 1},
    {"event": {"type": "note"}, "if_sequence": 1},
    {"title": "t", "description": "d", "priority": "high", "depends_on": ["i"], "labels": ["l"]},
]


def texts() -> list[Decoder]:
    from holdfast.cli.options import parse_size

    return [
        Decoder("strict JSON", strictjson.decode, (as_json(ISSUE), as_json(LEASE))),
        Decoder("claims folded from events", _fold, (b"\n".join(map(as_json, _EVENTS)), as_json(_EVENTS[0]))),
        Decoder("an event to append", _appended, (as_json(_EVENTS[2] | {"type": "note"}), b'{"type":"note"}')),
        Decoder("saved claims", _saved, (as_json({"claims": [_EVENTS[0] | {"sequence": 1}], "waiters": []}),)),
        Decoder("a batch of issues", lambda content: exchange.read_batch(content, "b"), (as_json([{"title": "t"}]),)),
        Decoder(
            "an import of issues",
            lambda content: exchange._parse(content, "an import"),  # noqa: SLF001
            (as_json({"issues": [ISSUE], "gates": {"g": GATE}}), as_json([ISSUE])),
        ),
        Decoder("the bodies of a manifest", _bodies, (_BODIES,)),
        Decoder("a body of a manifest", _body, (_BODY,), (Failure, ValueError, struct.error)),
        Decoder("a holder", _holder, (as_json({"holder_id": HOLDER, **IDENTITY}),)),
        Decoder("a request of a hook", _hook, tuple(map(as_json, _REQUESTS))),
        Decoder("arguments of an agent's tools", _arguments, tuple(map(as_json, _TOOLS))),
        Decoder("an answer of etcd", _answer, tuple(map(as_json, _ANSWERS))),
        Decoder(
            "an address of a store",
            _text(_address),
            (b"postgresql://u:p@h:1/d?schema=x&sslmode=require", b"etcd://u:p@h:1,g:2/x?tls=true&cacert=/c"),
        ),
        Decoder("settings of another program", _settings, (b'{"hooks": {"PreToolUse": []}, "a": [1]}\n',)),
        Decoder("a marked block", _marked_block, (_BLOCK,)),
        Decoder("an instant", _text(clock.parse_instant), (T.encode(),), (Failure, ValueError)),
        Decoder("a duration", _text(clock.parse_duration), (b"1h30m", b"250ms", b"12.5")),
        Decoder("a size", _text(parse_size), (b"10G", b"1.5MiB")),
        Decoder("a claim id", _text(issues.ClaimId.parse), (b"issue.1.secret",)),
        Decoder("a node", _text(ledger.node_id), (b"1.2.3",)),
        Decoder("a name", _text(names.safe_name), (b"a-name.x",)),
        Decoder("a relative path", _text(names.split_relative), (b"src/deep/a",)),
        Decoder("an actor", _text(names.checked_actor), (b"agent:alice",)),
    ]


_BODY = encode_body(Meta(b"d", 0o755, 1, 1, 1), b"", [encode_entry(Meta(b"f", 0o644, 1, 1, 1), b"name", 5, bytes(32))])
_BODIES = b"holdfast manifest 1\n" + len(b"").to_bytes(4, "little") + len(_BODY).to_bytes(4, "little") + _BODY
_BODIES += b"\xff\xff\xff\xff\x01\0\0\0"


def _body(content: bytes) -> object:
    """The entries of one directory; callers turn the documented errors into a `Failure`."""
    directory_of(b"src", content)
    return [decode_entry(b"src", raw) for raw in raw_entries(content).values()]


def all_decoders(directory: Path) -> list[Decoder]:
    """Every decoder; those that read files do so below this directory, which is empty."""
    return [*records(), *texts(), *in_files(directory)]


FILES = (
    *("a manifest", "a manifest to verify", "a list of shared directories", "the mark of a tree", "a store's address"),
    *("a lease, for the guard", "a lease, for a hook", "a checkpoint", "a stat cache", "a wait note"),
    *("a repository lock", "a claim file"),
)
"""The names of those that read files."""


def names_of_all() -> list[str]:
    return [*(each.name for each in (*records(), *texts())), *FILES]
