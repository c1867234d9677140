"""Content stores: chunks that all machines of a repository reach, and the addresses of such stores.

A stored chunk has the name `<hash>-<upload>`: the SHA-256 of its content, and the id of the upload that put it there.
Two uploads may store the same chunk. A name is used once, even after its chunk was deleted.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Annotated, Protocol
from urllib.parse import parse_qsl, urlsplit

import msgspec

from holdfast.errors import ExtraMissing, SettingInvalid
from holdfast.store.model import Store

POSTGRES = "postgres:"
"""The address of the content store in the schema of the records."""
EXPECTED = "'postgres:', or s3://bucket/prefix?endpoint=https://…&region=…"
S3_OPTIONS = ("endpoint", "region", "virtual_hosted_style")
SETTING = "content"

ChunkHash = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$")]
ChunkName = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}-([0-9a-f]{2})+$")]


class ContentStore(Protocol):
    """The interface of a content store."""

    def names(self, hashes: Collection[str]) -> dict[str, list[str]]:
        """The names of the stored chunks with these hashes, by hash."""

    def put(self, chunks: Mapping[str, bytes]) -> None:
        """Store chunks under their names; one that exists stays as it is."""

    def get(self, names: Collection[str]) -> dict[str, bytes]:
        """The chunks that exist under these names."""

    def every_name(self) -> Iterator[str]:
        """All names."""

    def delete(self, names: Collection[str]) -> None:
        """Delete chunks; missing ones are ignored."""

    def prepare(self) -> None:
        """Create what the store needs. Raises `Refused` if the server cannot be used for it."""


def hash_in(name: str) -> str:
    return name.partition("-")[0]


def upload_in(name: str) -> str:
    return name.partition("-")[2]


def checked_address(address: str) -> str:
    """The address, if it is valid. An invalid one is refused without quoting it, since it may contain secrets."""
    if address == POSTGRES:
        return address
    problem = None
    try:
        parts = urlsplit(address)
        options = dict(parse_qsl(parts.query, keep_blank_values=True, strict_parsing=bool(parts.query)))
        if parts.scheme != "s3" or not parts.netloc or not address.isprintable():
            problem = EXPECTED
        elif "@" in parts.netloc or ":" in parts.netloc or "@" in options.get("endpoint", ""):
            problem = "an address without a user or password: credentials come from the environment (AWS_…)"
        elif not options.keys() <= set(S3_OPTIONS) or parts.fragment:
            problem = f"with no other options than {', '.join(S3_OPTIONS)}"
        elif options.get("endpoint", "https:").partition(":")[0] not in ("http", "https"):
            problem = "with an endpoint that begins with https:// or http://"
    except ValueError:
        problem = EXPECTED
    if problem is not None:
        raise SettingInvalid(SETTING, "…", problem)
    return address


def open_content(address: str, store: Store) -> ContentStore:
    """The content store at an address, beside the store of the records."""
    checked_address(address)
    if address != POSTGRES:
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
        raise SettingInvalid(SETTING, address, "s3://bucket/prefix?…, because the records are not on PostgreSQL")
    from holdfast.store.content_postgres import PostgresContent
    from holdfast.store.postgres import PostgresEngine

    assert isinstance(engine, PostgresEngine)
    return PostgresContent(engine.connections)
