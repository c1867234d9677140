"""Opening the store of a directory: plain files, PostgreSQL or etcd.

An explicit address comes first (the command line takes it from `HOLDFAST_STORE`), then the one in
`.holdfast/config.json`, which the user must have approved (`approvals`), then plain files. Secrets are never written to
the configuration: they come with an explicit address or from the places that the server's own tools use (`.pgpass`, the
environment, certificates).
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import unquote

import msgspec

from holdfast.clock import SYSTEM_CLOCK, Clock
from holdfast.errors import (
    ExtraMissing,
    Failure,
    NotFound,
    SettingInvalid,
    UsageFailure,
)
from holdfast.fs import durable
from holdfast.fs.directory import Directory, make_directories, resolved
from holdfast.locks import flock
from holdfast.locks.file_lock import DEFAULT_TIMEOUT
from holdfast.locks.identity import current_holder
from holdfast.locks.retry import CHANCE
from holdfast.store import content, model
from holdfast.store.addresses import (
    EXPECTED,
    accepting_unsafe_server,
    is_remembered,
    opened,
    parts_of,
    remember,
    with_secrets,
    without_secrets,
)
from holdfast.store.addresses import FILES as FILES
from holdfast.store.files import FileStore
from holdfast.store.layout import CHECKPOINTS
from holdfast.store.model import CommitStatistics, Store, Tally

if TYPE_CHECKING:
    from holdfast.store.served import ServedStore

CONFIG = ".holdfast/config.json"
SETTINGS = ".holdfast/settings.json"  # of the repository; see `repository.settings`


class Config(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The store settings of a directory. Unknown keys are refused, not ignored."""

    schema_version: int = 1
    store: str = FILES
    issues_in_tree: bool = False  # of a git home: the tracker is in the main checkout
    clone: str = "main"  # of a plain home that has joined: its name
    clone_id: str = ""


_CODEC = model.StructCodec(Config)


def read_config(root: str | os.PathLike[str]) -> Config:
    """The settings of a directory; the defaults if it has none."""
    path = resolved(root) / CONFIG
    try:
        content = durable.read(path, limit=1 << 16)
    except NotFound:
        return Config()
    config = _CODEC.decode(content, str(path))
    if config.schema_version != 1:
        raise SettingInvalid("schema_version", str(config.schema_version), f"1, in {path}")
    return config


def configure_store(root: str | os.PathLike[str], address: str, *, check: bool = True) -> str:
    """Configure the store of a directory; return its address as stored, without secrets.

    With `check`, the store is opened first, and its tables are created; if that fails, the configuration stays.
    The address counts as approved, and its secrets are remembered for the rest of the process.
    """
    kept = without_secrets(address)
    remember(address)
    if check:
        store = open_address(root, address)
        try:
            store.now()
        finally:
            store.close()
    if kept != FILES:
        from holdfast.store.approvals import approve

        approve(root, store=kept)
    write_config(root, msgspec.structs.replace(read_config(root), store=kept))
    return kept


def write_config(root: str | os.PathLike[str], config: Config) -> None:
    path = resolved(root) / CONFIG
    make_directories(path.parent)
    durable.replace(path, msgspec.json.format(msgspec.json.encode(config), indent=2) + b"\n")


def open_store(
    root: str | os.PathLike[str], address: str | None = None, *, timeout: float | None = DEFAULT_TIMEOUT
) -> Store:
    """The store of a directory: the one at `address`, or else the configured one, which must be approved. `timeout`
    limits waits for document locks."""
    return open_address(root, address or approved_address(root), timeout=timeout)


def approved_address(root: str | os.PathLike[str]) -> str:
    """The configured address. `NotApproved` if it is not `files` and the user has neither named nor approved it."""
    address = read_config(root).store
    if address != FILES and not is_remembered(address):
        from holdfast.store.approvals import require_store

        require_store(root, address)
    return address


def open_address(
    root: str | os.PathLike[str], address: str, *, create: bool = True, timeout: float | None = DEFAULT_TIMEOUT
) -> Store:
    """The store at an address; `root` is the directory that `files` refers to. Without `create`, a missing store raises
    `NotFound`, now or at its first use. Adds remembered secrets (`remember`)."""
    if is_in_files(address):
        path = Path(root) if address == FILES else _path_of(address)
        if not create:
            Directory.follow(path).close()
        return _counted(FileStore(path, timeout=timeout), root)
    address = with_secrets(address)
    if _shared is None:
        return _counted(_open_server(address, create=create), root)
    if address not in _shared:
        _shared[address] = _counted(_open_server(address, create=create), root)
    return _shared[address]


_shared: dict[str, Store] | None = None


@contextlib.contextmanager
def sharing_connections() -> Iterator[None]:
    """Within the block, all parts of this process that open the same server share one store and its connections. If one
    part closes the store, the others only have to reconnect."""
    global _shared
    before, _shared = _shared, {}
    try:
        yield
    finally:
        for store in _shared.values():
            store.close()
        _shared = before


def _open_server(address: str, *, create: bool) -> ServedStore:
    scheme = address.partition(":")[0].lower()
    opened.add(scheme)
    if scheme in ("postgresql", "postgres"):
        return _open_postgres(address, create=create)
    if scheme == "etcd":
        from holdfast.store.etcd import EtcdStore

        return EtcdStore(address, create=create)
    raise SettingInvalid("store", "…", EXPECTED)


def _open_postgres(address: str, *, create: bool) -> ServedStore:
    try:
        from holdfast.store.postgres import PostgresStore
    except ImportError as error:
        raise ExtraMissing(
            f"a store on PostgreSQL needs psycopg, which cannot be loaded: {error}",
            hint="Install it: pip install 'psycopg[binary]>=3.3'.",
            extra="postgres",
        ) from error
    return PostgresStore(address, create=create)


def open_content(address: str, store: Store) -> content.ContentStore:
    """The content store at an address, beside the store of the records."""
    content.checked_address(address)
    if address != content.POSTGRES:
        try:
            from holdfast.store.content_s3 import S3Content
        except ImportError as error:
            message = f"a content store in object storage needs obstore, which cannot be loaded: {error}"
            raise ExtraMissing(message, hint="Install it: pip install 'obstore>=0.8'.", extra="s3") from error
        return S3Content(address)
    from holdfast.store.fail_fast import FailFastStore
    from holdfast.store.served import ServedStore

    if isinstance(store, FailFastStore):
        store = store.opened or store
    engine = store.engine if isinstance(store, ServedStore) else None
    if engine is None or not engine.address.startswith("postgres"):
        raise SettingInvalid(
            content.SETTING, address, "s3://bucket/prefix?…, because the records are not on PostgreSQL"
        )
    from holdfast.store.content_postgres import PostgresContent
    from holdfast.store.postgres import PostgresEngine

    assert isinstance(engine, PostgresEngine)
    return PostgresContent(engine.connections)


def _path_of(address: str) -> Path:
    parts = parts_of(address)
    path = unquote(parts.path)
    if parts.netloc not in ("", "localhost") or not path.startswith("/") or "\0" in path:
        raise SettingInvalid("store", without_secrets(address), EXPECTED)
    return Path(path)


def open_read_only(root: str | os.PathLike[str], address: str) -> Store:
    """The store at an address, for reading only; if it does not exist, an empty store in memory."""
    try:
        store = open_address(root, address, create=False)
        store.now()
    except NotFound:
        from holdfast.store.memory import MemoryStore

        return MemoryStore()
    return store


def address_of(root: str | os.PathLike[str], address: str | None = None) -> str:
    """The address of a directory's store, for display."""
    return without_secrets(address or read_config(root).store)


def is_in_files(address: str) -> bool:
    """Whether an address names a store in plain files, in this directory or another."""
    return address == FILES or address.partition(":")[0].lower() == "file"


class StoreHealth(NamedTuple):
    """The response time of a store, and how far its clock is ahead of this machine's, in seconds."""

    address: str
    seconds: float
    clock_difference: float

    def as_record(self) -> dict[str, Any]:
        return self._asdict()


def check_store(store: Store, address: str, *, clock: Clock = SYSTEM_CLOCK) -> StoreHealth:
    """Query a store. Raises `StoreUnavailable` if it does not answer, `StoreIncompatible` for an unknown schema."""
    store.now()  # connects, and finds or creates the tables
    started = time.monotonic()
    before = clock.wall()
    found = store.now()
    seconds = time.monotonic() - started
    return StoreHealth(address, seconds, found - (before + seconds / 2))


def same_store(root: str | os.PathLike[str], one: str, other: str) -> bool:
    """Whether two addresses obviously name the same store."""

    def normalized(address: str) -> str:
        if address == FILES:
            return Path(os.path.abspath(root)).as_uri()
        return accepting_unsafe_server(without_secrets(address), accept=False).rstrip("/")

    return normalized(one) == normalized(other)


def require_other_store(root: str | os.PathLike[str], one: str, other: str) -> None:
    if same_store(root, one, other):
        raise UsageFailure(f"{without_secrets(other)} is already the store in use")


# --- Statistics -----------------------------------------------------------------------------------
# Each process adds what its stores have counted to one small record per machine, when it is done. The record is a
# checkpoint file: a cache that is not synced and may be deleted, after which counting begins at zero. A process that
# has committed nothing writes nothing.

_STATISTICS = "statistics-"
_MOST_BYTES = 1 << 12
_TRIES = 10  # of the lock

_live: dict[int, tuple[Path, Tally]] = {}
_new: dict[Path, CommitStatistics] = {}
"""Counts that are not in a record yet."""


def _counted(store: FileStore | ServedStore, root: str | os.PathLike[str]) -> Store:
    """The store. `save_statistics` adds its counts to the record below this directory, even if it is gone by then."""
    _live[id(store.tally)] = Path(root), store.tally
    weakref.finalize(store, _retire, id(store.tally)).atexit = False
    return store


def _retire(key: int) -> None:
    if key in _live:
        root, tally = _live.pop(key)
        _note(root, tally.new())


def _note(root: Path, new: CommitStatistics) -> None:
    _new[root] = _new.get(root, CommitStatistics()).plus(new)


def _forget() -> None:
    _live.clear()
    _new.clear()


if sys.platform != "win32":
    os.register_at_fork(after_in_child=_forget)  # what the parent has counted is its own


def save_statistics() -> None:
    """Add what the stores of this process have counted to the record of this machine. Never fails: it is then added
    later, or lost."""
    for root, tally in list(_live.values()):
        _note(root, tally.new())
    for root, new in list(_new.items()):
        if new.commits:
            with contextlib.suppress(Failure, OSError):
                if _add(root, new):
                    _note(root, CommitStatistics().plus(new, -1))


def _add(root: Path, new: CommitStatistics) -> bool:
    """Add to the record of this machine; False if others kept its directory locked for some milliseconds."""
    file = f"{_STATISTICS}{current_holder().machine_id}"
    with _checkpoints(root) as directory:
        if directory.fd is None or not _try_lock(directory.fd):
            return False
        try:
            content = msgspec.json.encode(_read(directory, file).plus(new))
            durable.publish(directory, durable.write_draft(directory, file, content, durable=False), file)
        finally:
            flock.unlock(directory.fd)
    return True


@contextlib.contextmanager
def _checkpoints(root: Path) -> Iterator[Directory]:
    """The directory of the checkpoints. Raises `NotFound` if the repository is gone: nothing brings it back."""
    above, _, name = CHECKPOINTS.rpartition("/")
    with (
        Directory.open(root) as top,
        top.enter(above, create=True) as control,
        control.enter(name, create=True) as directory,
    ):
        yield directory


def _try_lock(descriptor: int) -> bool:
    for _ in range(_TRIES):
        if flock.try_lock(descriptor, shared=False):
            return True
        time.sleep(CHANCE.random() * 0.002)
    return False


def _read(directory: Directory, file: str) -> CommitStatistics:
    with contextlib.suppress(Failure, msgspec.DecodeError):
        found = msgspec.json.decode(durable.read_in(directory, file, limit=_MOST_BYTES), type=CommitStatistics)
        if min(found) >= 0:
            return found
    return CommitStatistics()


def saved_statistics(root: Path) -> CommitStatistics:
    """The sum of all machines' records below this directory."""
    found = CommitStatistics()
    with contextlib.suppress(Failure, OSError), Directory.open(root / CHECKPOINTS) as directory:
        for name in directory.names():
            if name.startswith(_STATISTICS):
                found = found.plus(_read(directory, name))
    return found
