"""The content store in S3-compatible object storage: `s3://bucket/prefix?endpoint=…&region=…`.

A chunk is the object `<prefix>/<hash>/<upload>`, created with `If-None-Match: *`, so it never changes. Credentials come
from the environment (`AWS_…`), as for other programs that use S3.
"""

from __future__ import annotations

import contextlib
import re
import secrets
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any, TypeVar
from urllib.parse import parse_qsl, urlsplit

import obstore
from obstore.exceptions import AlreadyExistsError, BaseError, PermissionDeniedError, UnauthenticatedError
from obstore.store import S3Store

from holdfast.errors import ContentStoreUnsafe, StoreAccessRefused, StoreUnavailable
from holdfast.store.content import hash_in, upload_in

Item = TypeVar("Item")
Answer = TypeVar("Answer")

_AT_ONCE = 8
_FEW = 2000  # hashes; to find more of them, everything is listed
_TIMEOUT = "30s"
_RETRIES = {"max_retries": 3, "retry_timeout": timedelta(seconds=20)}
_NAME = re.compile("([0-9a-f]{64})/([0-9a-f]+)", re.ASCII)
_PROBE = "0" * 64
_DENIED = re.compile("40[13] |AccessDenied|InvalidAccessKeyId|SignatureDoesNotMatch|credential", re.IGNORECASE)


class S3Content:
    """Chunks as objects in a bucket."""

    def __init__(self, address: str) -> None:
        self.address = address
        parts = urlsplit(address)
        options: dict[str, Any] = dict(parse_qsl(parts.query))
        if options.pop("virtual_hosted_style", "false") == "true":
            options["virtual_hosted_style_request"] = True
        allowed = {"allow_http": options.get("endpoint", "").startswith("http:"), "timeout": _TIMEOUT}
        with _failures(address):
            options |= {"prefix": parts.path.strip("/") or None, "retry_config": _RETRIES}
            self._store: Any = S3Store(parts.netloc, client_options=allowed, **options)

    def names(self, hashes: Collection[str]) -> dict[str, list[str]]:
        found: dict[str, list[str]] = {}
        if len(hashes) > _FEW:
            wanted = set(hashes)
            listed = (name for name in self.every_name() if hash_in(name) in wanted)
        else:
            listed = (name for names in self._each(self._names_of, hashes) for name in names)
        for name in listed:
            found.setdefault(hash_in(name), []).append(name)
        return found

    def put(self, chunks: Mapping[str, bytes]) -> None:
        self._each(lambda item: self._create(*item), chunks.items())

    def get(self, names: Collection[str]) -> dict[str, bytes]:
        found = zip(names, self._each(self._read, names), strict=True)
        return {name: data for name, data in found if data is not None}

    def every_name(self) -> Iterator[str]:
        return self._listed(None)

    def delete(self, names: Collection[str]) -> None:
        paths = list(map(_path_of, names))
        with _failures(self.address):
            for start in range(0, len(paths), 1000):
                obstore.delete(self._store, paths[start : start + 1000])

    def prepare(self) -> None:
        """Probe the server: if it ignores conditions, it could replace chunks."""
        probe = f"{_PROBE}-{secrets.token_hex(8)}"
        self._create(probe, b"first")
        try:
            if self._create(probe, b"second") or self._read(probe) != b"first":
                raise ContentStoreUnsafe(self.address)
        finally:
            self.delete([probe])

    def _create(self, name: str, data: bytes) -> bool:
        with _failures(self.address):
            try:
                obstore.put(self._store, _path_of(name), data, mode="create", use_multipart=False)
            except AlreadyExistsError:
                return False
            return True

    def _read(self, name: str) -> bytes | None:
        with _failures(self.address):
            try:
                return bytes(obstore.get(self._store, _path_of(name)).bytes())
            except FileNotFoundError:
                return None

    def _names_of(self, digest: str) -> list[str]:
        return list(self._listed(digest))

    def _listed(self, prefix: str | None) -> Iterator[str]:
        with _failures(self.address):
            for page in obstore.list(self._store, prefix=prefix):
                for each in page:
                    if match := _NAME.fullmatch(each["path"]):
                        yield f"{match[1]}-{match[2]}"

    def _each(self, work: Callable[[Item], Answer], items: Collection[Item]) -> list[Answer]:
        """The results of requests, several at once; the first failure is raised."""
        if len(items) < 2:
            return list(map(work, items))
        with ThreadPoolExecutor(min(_AT_ONCE, len(items))) as threads:
            return list(threads.map(work, items))


def _path_of(name: str) -> str:
    return f"{hash_in(name)}/{upload_in(name)}"


@contextlib.contextmanager
def _failures(address: str) -> Iterator[None]:
    """Turn the errors of obstore into failures of the content store."""
    try:
        yield
    except (BaseError, OSError, ValueError) as error:
        reason = " ".join(str(error).partition("Debug source")[0].split())[:300]
        if isinstance(error, PermissionDeniedError | UnauthenticatedError) or _DENIED.search(reason):
            hint = "Set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, and allow them to read and write the bucket."
            raise StoreAccessRefused(address, reason, hint=hint) from error
        raise StoreUnavailable(address, reason, hint="Check the address, the network and the server.") from error
