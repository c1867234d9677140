"""A linter for SQL that must also run on CockroachDB and YugabyteDB.

The rules come from the manuals of both: "PostgreSQL compatibility" and "Read committed" of CockroachDB;
"PostgreSQL compatibility", "Transactional DDL" and "Isolation levels" of YugabyteDB.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple


class Foreign(NamedTuple):
    """A feature that no statement may use: how to recognise it, and why."""

    name: str
    pattern: str
    why: str


FOREIGN = (
    Foreign("advisory locks", r"\bpg_(try_)?advisory", "a no-op in CockroachDB, late in YugabyteDB"),
    Foreign("lock modes", r"\bSKIP LOCKED\b|\bNOWAIT\b|\bLOCK TABLE\b|\bLOCK \w+ IN\b", "partly ignored"),
    Foreign("weak row locks", r"\bFOR (NO KEY UPDATE|KEY SHARE)\b", "other modes in CockroachDB"),
    Foreign(
        "code in the server",
        r"\bCREATE (OR REPLACE )?(FUNCTION|PROCEDURE|TRIGGER|RULE|EXTENSION)\b|\bplpgsql\b|\bDO \$|\bCALL\b",
        "triggers, rules and extensions are missing, or differ",
    ),
    Foreign(
        "numbers from sequences",
        r"\b(SMALL|BIG)?SERIAL\d?\b|\bSEQUENCE\b|\bnextval\b|\bGENERATED\b|\bIDENTITY\b",
        "they have gaps, and are not in order",
    ),
    Foreign("system columns", r"\b(xmin|xmax|cmin|cmax|ctid|tableoid)\b", "there are no such row versions"),
    Foreign("deferred constraints", r"\bDEFERRABLE\b|\bDEFERRED\b|\bEXCLUDE USING\b", "not supported"),
    Foreign("tables of a session", r"\b(TEMP|TEMPORARY|UNLOGGED)\b", "experimental, or not supported"),
    Foreign("cursors", r"\bDECLARE\b|\bFETCH (NEXT|\d)|\bMOVE\b|\bCOPY\b", "limited in CockroachDB"),
    Foreign("two phases", r"\bPREPARE TRANSACTION\b|\bCOMMIT PREPARED\b", "not supported"),
    Foreign("savepoints", r"\bSAVEPOINT\b", "special meanings in CockroachDB"),
    Foreign("collations", r"\bCOLLATE\b", "different ones there"),
    Foreign("constraints by name", r"\bON CONSTRAINT\b", "not supported by CockroachDB"),
    Foreign(
        "later commands",
        r"\bMERGE\b|\bTRUNCATE\b|\bINHERITS\b|\bXML|\bVACUUM\b",
        "not supported, or DDL there",
    ),
    Foreign("own isolation", r"\bSET (SESSION |LOCAL )?TRANSACTION\b|\bISOLATION LEVEL\b", "one level for all"),
    Foreign(
        "functions of this server",
        r"\bpg_(?!(?:notify|current_xact_id|current_snapshot|snapshot_xmin)\b)\w+\s*\(",
        "many are missing",
    ),
)
"""The patterns match statements joined into one line."""

NOTIFICATIONS = re.compile(r"\bLISTEN\b|\bUNLISTEN\b|\bNOTIFY\b|\bpg_notify\b|\bwatchers\b", re.IGNORECASE)
"""Allowed, but only where the store works without them."""

NUMBERS = re.compile(r"\bpg_(current_xact_id|current_snapshot|snapshot_xmin)\b", re.IGNORECASE)
"""The numbers of transactions: allowed, but only where the store works without them."""

_CHANGES = re.compile(r"\b(?:INSERT INTO|UPDATE|DELETE FROM)\s+(\w+)", re.IGNORECASE)
_STRUCTURE = re.compile(r"^\s*(CREATE|ALTER|DROP|GRANT|REVOKE)\b", re.IGNORECASE)
_TABLE = re.compile(r"^\s*CREATE TABLE\b(?!.*\bPRIMARY KEY\b)", re.IGNORECASE)


def problems_of(statement: str) -> Iterator[str]:
    """The problems of one statement."""
    line = " ".join(statement.split())
    for each in FOREIGN:
        if re.search(each.pattern, line, re.IGNORECASE):
            yield f"{each.name} ({each.why}): {line}"
    if _TABLE.search(line):
        yield f"a table without a primary key: {line}"
    changed = Counter(_CHANGES.findall(line.replace("DO UPDATE SET", "")))
    for table, times in changed.items():
        if times > 1:
            yield f"{table} is changed {times} times in one statement, which CockroachDB refuses: {line}"


def problems_of_session(statements: Sequence[str]) -> Iterator[str]:
    """The problems of a sequence of statements on one connection."""
    open_transaction = False
    for statement in statements:
        word = statement.split()[0].upper()
        if word == "BEGIN":
            open_transaction = True
        elif word in ("COMMIT", "ROLLBACK"):
            open_transaction = False
        elif open_transaction and _STRUCTURE.search(statement):
            yield f"a schema change within a transaction: {statement}"


def all_problems(sessions: Iterable[Sequence[str]]) -> list[str]:
    """The problems of all statements of several connections."""
    listed = list(sessions)
    found = {each for session in listed for statement in session for each in problems_of(statement)}
    return sorted(found | {each for session in listed for each in problems_of_session(session)})
