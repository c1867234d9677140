"""Which store keeps what is shared below a directory: plain files, PostgreSQL or etcd.

An address that is handed in comes first (the command line reads it from `HOLDFAST_STORE`), then the one that
`.holdfast/config.json` names, then plain files. Secrets are never written there: they come with the address
that is handed in, or from where the server's own tools look (`.pgpass`, the environment, certificates).
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar
from urllib.parse import unquote

import msgspec

from holdfast.clock import SYSTEM_CLOCK, Clock
from holdfast.errors import (
    ExtraMissing,
    Failure,
    NotFound,
    SettingInvalid,
    StoreIncompatible,
    StoreUnavailable,
    UsageFailure,
)
from holdfast.fs import durable
from holdfast.fs.directory import Directory, make_directories
from holdfast.locks.file_lock import DEFAULT_TIMEOUT
from holdfast.store.addresses import parts_of, remember_secrets, with_secrets, without_secrets
from holdfast.store.files import FileStore
from holdfast.store.model import (
    Commit,
    Decide,
    Document,
    Entry,
    Family,
    Key,
    Record,
    Result,
    Store,
    Stream,
    StructCodec,
    View,
    Watch,
    Watched,
)

CONFIG = ".holdfast/config.json"
FILES = "files"
"""The address of the store that needs no server: the files of the directory itself."""

EXPECTED = "'files', file:///directory, postgresql://host/database?schema=name, or etcd://host:port,…/prefix"


class Config(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """What is settled for one directory. A key that is not known is refused, not ignored."""

    schema_version: int = 1
    store: str = FILES


_CODEC = StructCodec(Config)


def read_config(root: str | os.PathLike[str]) -> Config:
    """What is settled for a directory; the defaults if nothing is."""
    path = Path(root) / CONFIG
    try:
        content = durable.read(path, limit=1 << 16)
    except NotFound:
        return Config()
    config = _CODEC.decode(content, str(path))
    if config.schema_version != 1:
        raise SettingInvalid("schema_version", str(config.schema_version), f"1, in {path}")
    return config


def require_store(root: str | os.PathLike[str], address: str) -> None:
    """Open the store at an address, make its tables if they are not there, and close it. Raises what is in
    the way: an address that cannot be read, a server that is away or refuses. `root` is not touched."""
    store = open_address(root, address)
    try:
        store.now()
    finally:
        close_store(store)


def configure_store(root: str | os.PathLike[str], address: str, *, check: bool = True) -> str:
    """Settle on a store for a directory: its address is written down, without secrets, and returned.

    With `check` the store is opened first, and its tables are made: an address that does not work, or a
    server that is away, changes nothing. Secrets are remembered as long as this process lives.
    """
    kept = FILES if address == FILES else without_secrets(address)
    remember_secrets(address)
    if check:
        require_store(root, address)
    path = Path(os.path.abspath(root)) / CONFIG
    make_directories(path.parent)
    durable.replace(path, msgspec.json.format(msgspec.json.encode(Config(1, kept)), indent=2) + b"\n")
    return kept


def open_store(
    root: str | os.PathLike[str], address: str | None = None, *, timeout: float | None = DEFAULT_TIMEOUT
) -> Store:
    """The store of the directory `root`: the one at this address, else the one that was settled on.

    `timeout` is how long to wait for a lock, where there are any.
    """
    return open_address(root, address or read_config(root).store, timeout=timeout)


def open_address(
    root: str | os.PathLike[str],
    address: str,
    *,
    create: bool = True,
    timeout: float | None = DEFAULT_TIMEOUT,
) -> Store:
    """The store at an address; `root` is the directory whose files `files` means.

    Without `create` nothing is made: a store that is not there is `NotFound`, now or when it is first used.
    What the address does not say of secrets is added, if it was remembered (`remember_secrets`).
    """
    address = with_secrets(address)
    scheme = address.partition(":")[0].lower()
    if is_in_files(address):
        path = Path(root) if address == FILES else _path_of(address)
        if not create:
            Directory.open(path).close()
        return FileStore(path, timeout=timeout)
    if scheme in ("postgresql", "postgres"):
        return _open_postgres(address, create=create)
    if scheme == "etcd":
        from holdfast.store.etcd import EtcdStore

        return EtcdStore(address, create=create)
    raise SettingInvalid("store", without_secrets(address), EXPECTED)


def _open_postgres(address: str, *, create: bool) -> Store:
    try:
        from holdfast.store.postgres import PostgresStore
    except ImportError as error:
        raise ExtraMissing(
            f"a store on PostgreSQL needs psycopg, which cannot be loaded: {error}",
            hint="Install it: pip install 'psycopg[binary]>=3.3'.",
            extra="postgres",
        ) from error
    return PostgresStore(address, create=create)


def _path_of(address: str) -> Path:
    parts = parts_of(address)
    if parts.netloc not in ("", "localhost") or not parts.path.startswith("/"):
        raise SettingInvalid("store", address, EXPECTED)
    return Path(unquote(parts.path))


def open_to_look(root: str | os.PathLike[str], address: str) -> Store:
    """The store at an address, only to be looked at: one that is not there yet is an empty one in memory."""
    try:
        store = open_address(root, address, create=False)
        store.now()
    except NotFound:
        from holdfast.store.memory import MemoryStore

        return MemoryStore()
    return store


def address_of(root: str | os.PathLike[str], address: str | None = None) -> str:
    """Where the store of a directory is, as it may be shown."""
    chosen = address or read_config(root).store
    return chosen if chosen == FILES else without_secrets(chosen)


def is_in_files(address: str) -> bool:
    """Whether the store at an address is plain files, be it those of another directory."""
    return address == FILES or address.partition(":")[0].lower() == "file"


def close_store(store: Store) -> None:
    """Let go of a store."""
    close = getattr(store, "close", None)
    if close is not None:
        close()


def skew_of(store: Store) -> float | None:
    """How far apart the times of two clients of a store can be; None if it has no clock of its own, and
    goes by those of the machines."""
    found: float | None = getattr(store, "skew", None)
    return found


class StoreHealth(NamedTuple):
    """What `doctor` wants to know of a store that answers: how fast it does, and how its clock differs."""

    address: str
    seconds: float
    clock_difference: float

    def as_record(self) -> dict[str, Any]:
        return self._asdict()


def check_store(store: Store, address: str, *, clock: Clock = SYSTEM_CLOCK) -> StoreHealth:
    """Ask a store something. One that is away raises `StoreUnavailable`, one with another version of the
    schema `StoreIncompatible`. The difference is positive if the store's clock is ahead of this machine's."""
    store.now()  # connects, and finds or makes the tables
    started = time.monotonic()
    before = clock.wall()
    found = store.now()
    seconds = time.monotonic() - started
    return StoreHealth(address, seconds, found - (before + seconds / 2))


def same_store(root: str | os.PathLike[str], one: str, other: str) -> bool:
    """Whether two addresses are obviously those of one store."""

    def plain(address: str) -> str:
        if address == FILES:
            return Path(os.path.abspath(root)).as_uri()
        return without_secrets(address).rstrip("/")

    return plain(one) == plain(other)


def require_other_store(root: str | os.PathLike[str], one: str, other: str) -> None:
    """Refuse to do with one store what takes two."""
    if same_store(root, one, other):
        raise UsageFailure(f"{without_secrets(other)} is the store that is used already")


Answer = TypeVar("Answer")


class FailingFast:
    """A store that `open_it` opens when it is first asked. `trouble` is why it cannot be used, or None."""

    def __init__(self, open_it: Callable[[], Store]) -> None:
        self._open_it = open_it
        self._store: Store | None = None
        self.trouble: Failure | None = None

    def read(self, key: Key[Record]) -> Document[Record] | None:
        return self._ask(lambda store: store.read(key))

    def read_together(self, keys: Sequence[Key[Any]]) -> View:
        return self._ask(lambda store: store.read_together(keys))

    def scan(self, family: Family[Record]) -> Iterator[tuple[str, Document[Record]]]:
        return self._each(lambda store: store.scan(family))

    def entries(self, stream: Stream[Record], *, after: int = 0) -> Iterator[Entry[Record]]:
        return self._each(lambda store: store.entries(stream, after=after))

    def transact(
        self,
        keys: Iterable[Key[Any] | Stream[Any]],
        decide: Decide[Result],
        *,
        commit_id: str | None = None,
    ) -> Commit[Result]:
        return self._ask(lambda store: store.transact(keys, decide, commit_id=commit_id))

    def watch(self, what: Watched) -> Watch:
        return self._ask(lambda store: store.watch(what))

    def now(self) -> float:
        return self._ask(lambda store: store.now())

    def close(self) -> None:
        """Let go of the store, if it was ever opened."""
        close = getattr(self._store, "close", None)
        if close is not None:
            close()

    def _ask(self, question: Callable[[Store], Answer]) -> Answer:
        store = self._opened()
        try:
            return question(store)
        except (StoreUnavailable, StoreIncompatible) as failure:
            self.trouble = failure
            raise

    def _each(self, question: Callable[[Store], Iterator[Answer]]) -> Iterator[Answer]:
        store = self._opened()
        try:
            yield from question(store)
        except (StoreUnavailable, StoreIncompatible) as failure:
            self.trouble = failure
            raise

    def _opened(self) -> Store:
        if self.trouble is not None:
            raise self.trouble.with_traceback(None)
        if self._store is None:
            try:
                self._store = self._open_it()
            except Failure as failure:
                self.trouble = failure
                raise
        return self._store
