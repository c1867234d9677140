"""The content store in PostgreSQL: one more table in the schema of the records, so both are one backup."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from holdfast.store import postgres_sql as statements
from holdfast.store.content import hash_in, upload_in
from holdfast.store.postgres_connections import Connections

_PAGE = 4096


class PostgresContent:
    """Chunks in the table `content`."""

    def __init__(self, connections: Connections) -> None:
        self._connections = connections

    def names(self, hashes: Collection[str]) -> dict[str, list[str]]:
        found: dict[str, list[str]] = {}
        for page in _pages(list(hashes)):
            for digest, upload in self._rows(statements.CHUNK_NAMES, [[bytes.fromhex(each) for each in page]]):
                found.setdefault(digest.hex(), []).append(_name(digest, upload))
        return found

    def put(self, chunks: Mapping[str, bytes]) -> None:
        if chunks:
            self._run(statements.PUT_CHUNKS, [*_keys(chunks), list(chunks.values())])

    def get(self, names: Collection[str]) -> dict[str, bytes]:
        rows = self._rows(statements.GET_CHUNKS, _keys(names)) if names else []
        return {_name(digest, upload): data for digest, upload, data in rows}

    def every_name(self) -> Iterator[str]:
        after: tuple[bytes, bytes] = (b"", b"")
        while rows := self._rows(statements.PAGE_OF_CHUNKS, [*after, _PAGE]):
            yield from (_name(*row) for row in rows)
            after = rows[-1]

    def delete(self, names: Collection[str]) -> None:
        for page in _pages(list(names)):
            self._run(statements.DELETE_CHUNKS, _keys(page))

    def prepare(self) -> None:
        self._run(statements.CREATE_CONTENT, [])

    def _run(self, statement: str, parameters: Sequence[Any]) -> None:
        self._connections.run(lambda connection: connection.execute(statement, parameters, binary=True))

    def _rows(self, statement: str, parameters: Sequence[Any]) -> list[Any]:
        return self._connections.run(
            lambda connection: connection.execute(statement, parameters, binary=True).fetchall()
        )


def _name(digest: bytes, upload: bytes) -> str:
    return f"{digest.hex()}-{upload.hex()}"


def _keys(names: Collection[str]) -> list[Any]:
    return [[bytes.fromhex(hash_in(each)) for each in names], [bytes.fromhex(upload_in(each)) for each in names]]


def _pages(items: Sequence[str]) -> Iterator[Sequence[str]]:
    return (items[start : start + _PAGE] for start in range(0, len(items), _PAGE))
