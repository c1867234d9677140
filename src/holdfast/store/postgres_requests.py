"""Requests on one connection to PostgreSQL, with a time limit for every answer.

The server keeps the locks of a transaction until it has received its end. So whatever locks or writes is one message
that has its own end (see docs/protocols/served-commits.md).
"""

from __future__ import annotations

import functools
import itertools
import re
import time
from collections.abc import Mapping, Sequence
from typing import Any

import psycopg

from holdfast.clock import format_duration
from holdfast.store.served import TIMEOUT, TimeLimit

DEFAULT_SCHEMA = "holdfast"  # of the statements, too
PREPARE_AFTER = 2  # uses of a statement; a command with one commit saves the round trip
_NUMBERS = itertools.count()  # of prepared statements
_PARAMETER = re.compile(r"%\((\w+)\)s")


class Connection(psycopg.Connection):  # type: ignore[misc]  # its types exist only if it is installed
    """A connection with a time limit for every answer of the server, and with a configurable schema."""

    answer_within = TIMEOUT
    deadline = TimeLimit()
    schema = DEFAULT_SCHEMA
    prepares = True  # whether `write` does
    idle_since = 0.0

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._uses: dict[str, int] = {}  # of each statement of `write`

    def placed(self, statement: Any) -> Any:
        """The statement, with its tables qualified by the schema of this connection."""
        if not isinstance(statement, str) or self.schema == DEFAULT_SCHEMA:
            return statement
        return statement.replace(f"{DEFAULT_SCHEMA}.", f'"{self.schema}".')

    def execute(self, query: Any, *arguments: Any, **options: Any) -> Any:
        return super().execute(self.placed(query), *arguments, **options)

    def ask(self, statement: str, parameters: Any) -> Any:
        """Execute a frequent statement that only reads; it is prepared after a few uses. Others would keep their locks
        until the end of the transaction, which is a message of its own, has arrived."""
        return self.execute(statement, parameters, binary=True)

    def ask_at_once(self, several: str, parameters: Any = None) -> Any:
        """Execute several statements in one message, by default as one transaction: the server starts after it has
        received all of it, and ends without the client."""
        return psycopg.ClientCursor(self).execute(self.placed(several), parameters)

    def write(
        self, statement: str, parameters: Mapping[str, Any], *, begin: Sequence[str] = (), then: Sequence[str] = ()
    ) -> Any:
        """Execute a frequent statement at once, between others; it is prepared after a few uses."""
        uses = self._uses[statement] = self._uses.get(statement, 0) + 1
        before, execute = list(begin), statement
        if uses > PREPARE_AFTER and self.prepares:
            prepare, execute = _prepared(statement)
            if uses > PREPARE_AFTER + 1:
                try:
                    return self._answer(before, execute, then, parameters)
                except psycopg.errors.InvalidSqlStatementName:  # psycopg has deallocated all after a rollback
                    if self.info.transaction_status != psycopg.pq.TransactionStatus.IDLE:
                        if not begin:
                            self._uses[statement] = PREPARE_AFTER  # the next use prepares it again
                            raise
                        self.execute("ROLLBACK")
            before.append(prepare)
        return self._answer(before, execute, then, parameters)

    def _answer(self, before: Sequence[str], statement: str, then: Sequence[str], parameters: Mapping[str, Any]) -> Any:
        answer = self.ask_at_once("; ".join((*before, statement, *then)), parameters)
        for _ in before:
            answer.nextset()
        return answer

    def wait(self, gen: Any, interval: float = 0.1, timeout: float | None = None) -> Any:
        if timeout is not None:
            return super().wait(gen, interval, timeout)
        limit = self.deadline.left(self.answer_within) + 1  # the server gives up first, if it can
        started = time.monotonic()
        try:
            return super().wait(gen, interval, limit)
        except psycopg.Error:
            raise
        except Exception as error:
            if time.monotonic() - started < limit:
                raise
            self.close()
            raise psycopg.OperationalError(f"the server did not answer within {format_duration(limit)}") from error


@functools.cache
def _prepared(statement: str) -> tuple[str, str]:
    """The statement as PREPARE and EXECUTE."""
    names = list(dict.fromkeys(_PARAMETER.findall(statement)))
    body = _PARAMETER.sub(lambda found: f"${names.index(found[1]) + 1}", statement)
    call = f"holdfast_{next(_NUMBERS)}"
    return f"PREPARE {call} AS {body}", f"EXECUTE {call} ({', '.join(f'%({name})s' for name in names)})"
