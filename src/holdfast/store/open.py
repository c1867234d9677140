"""Opening the store of a directory: plain files, PostgreSQL or etcd.

An explicit address comes first (the command line takes it from `HOLDFAST_STORE`), then the one in
`.holdfast/config.json`, which the user must have approved (`approvals`), then plain files. Secrets are never written to
the configuration: they come with an explicit address or from the places that the server's own tools use (`.pgpass`, the
environment, certificates).
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import unquote

import msgspec

from holdfast.clock import SYSTEM_CLOCK, Clock
from holdfast.errors import (
    ExtraMissing,
    NotFound,
    SettingInvalid,
    UsageFailure,
)
from holdfast.fs import durable
from holdfast.fs.directory import Directory, make_directories, resolved
from holdfast.locks.file_lock import DEFAULT_TIMEOUT
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
from holdfast.store.model import Store

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
        return FileStore(path, timeout=timeout)
    address = with_secrets(address)
    if _shared is None:
        return _open_server(address, create=create)
    if address not in _shared:
        _shared[address] = _open_server(address, create=create)
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


def _open_server(address: str, *, create: bool) -> Store:
    scheme = address.partition(":")[0].lower()
    opened.add(scheme)
    if scheme in ("postgresql", "postgres"):
        return _open_postgres(address, create=create)
    if scheme == "etcd":
        from holdfast.store.etcd import EtcdStore

        return EtcdStore(address, create=create)
    raise SettingInvalid("store", "…", EXPECTED)


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
