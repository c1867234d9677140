"""What SQL must not have that is to run on CockroachDB and YugabyteDB as well, told by reading statements.

Their manuals say what they do not have, or do differently: "PostgreSQL compatibility" and "Read committed" of
CockroachDB; "PostgreSQL compatibility", "Transactional DDL" and "Isolation levels" of YugabyteDB.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple


class Foreign(NamedTuple):
    """Something that a statement must not have, how it is recognised, and why."""

    name: str
    pattern: str
    why: str


FOREIGN = (
    Foreign("advisory locks", r"\bpg_(try_)?advisory", "a no-op in CockroachDB, late in YugabyteDB"),
    Foreign("lock modes", r"\bSKIP LOCKED\b|\bNOWAIT\b|\bLOCK TABLE\b|\bLOCK \w+ IN\b", "partly without effect"),
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
    Foreign("collations", r"\bCOLLATE\b", "other ones there"),
    Foreign("constraints by name", r"\bON CONSTRAINT\b", "not supported by CockroachDB"),
    Foreign(
        "later commands",
        r"\bMERGE\b|\bTRUNCATE\b|\bINHERITS\b|\bXML|\bVACUUM\b",
        "not supported, or DDL there",
    ),
    Foreign("own isolation", r"\bSET (SESSION |LOCAL )?TRANSACTION\b|\bISOLATION LEVEL\b", "one level for all"),
    Foreign("functions of this server", r"\bpg_(?!notify\b)\w+\s*\(", "many are missing"),
)
"""Statements are compared without comments and in one line."""

NOTIFICATIONS = re.compile(r"\bLISTEN\b|\bUNLISTEN\b|\bNOTIFY\b|\bpg_notify\b|\bwatchers\b", re.IGNORECASE)
"""Allowed, but only where they can be done without."""

_CHANGES = re.compile(r"\b(?:INSERT INTO|UPDATE|DELETE FROM)\s+(\w+)", re.IGNORECASE)
_STRUCTURE = re.compile(r"^\s*(CREATE|ALTER|DROP|GRANT|REVOKE)\b", re.IGNORECASE)
_TABLE = re.compile(r"^\s*CREATE TABLE\b(?!.*\bPRIMARY KEY\b)", re.IGNORECASE)


def troubles(statement: str) -> Iterator[str]:
    """What is wrong with a statement."""
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


def troubles_of_a_session(statements: Sequence[str]) -> Iterator[str]:
    """What is wrong with statements that one connection sends one after the other."""
    open_transaction = False
    for statement in statements:
        word = statement.split()[0].upper()
        if word == "BEGIN":
            open_transaction = True
        elif word in ("COMMIT", "ROLLBACK"):
            open_transaction = False
        elif open_transaction and _STRUCTURE.search(statement):
            yield f"the structure is changed within a transaction: {statement}"


def all_troubles(sessions: Iterable[Sequence[str]]) -> list[str]:
    """What is wrong with all statements of several connections."""
    listed = list(sessions)
    found = {each for session in listed for statement in session for each in troubles(statement)}
    return sorted(found | {each for session in listed for each in troubles_of_a_session(session)})
