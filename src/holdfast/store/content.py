"""The interface of content stores, which keep chunks for all machines of a repository, and their addresses.

A stored chunk has the name `<hash>-<upload>`: the SHA-256 of its content, and the id of the upload that put it there.
Two uploads may store the same chunk. A name is used once, even after its chunk was deleted.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Annotated, Protocol
from urllib.parse import parse_qsl, urlsplit

import msgspec

from holdfast.errors import SettingInvalid

POSTGRES = "postgres:"
"""The address of the content store in the schema of the records."""
EXPECTED = "'postgres:', or s3://bucket/prefix?endpoint=https://…&region=…"
S3_OPTIONS = ("endpoint", "region", "virtual_hosted_style")
SETTING = "content"

ChunkHash = Annotated[str, msgspec.Meta(pattern=r"\A[0-9a-f]{64}\Z")]
ChunkName = Annotated[str, msgspec.Meta(pattern=r"\A[0-9a-f]{64}-([0-9a-f]{2})+\Z")]


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
