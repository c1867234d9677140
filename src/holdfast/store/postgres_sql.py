"""The SQL of the PostgreSQL store, which related distributed databases accept too.

It uses no advisory locks, procedures, triggers or collations: names are bytes, so that their order is the same on every
server. Every table is qualified with its schema, here the default one (`Connection.placed` substitutes another):
nothing may depend on the session, which a pooler may share among repositories. A deleted document keeps its row, with
no content: its absence can be locked and has a version. A stream has a row with the position of its last record.

The note of a commit lists the documents that it changed and the number of its transaction. Transactions do not end in
the order of their numbers, so a cursor is not the last number seen but the lowest that may still be in use (`CHANGES`):
every transaction that ends later has this number or a higher one. Servers without such numbers work too
(`unnumbered`), but readers cannot ask them for changes.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping

from holdfast.store import served
from holdfast.store.served import field_start

SCHEMA_VERSION = 3  # has archived streams; the first archive upgrades a store (`BURY`)
FIRST_VERSION = 2  # of a new store; 1 had notes without names and numbers, see `UPGRADE`

CREATE = """
CREATE TABLE IF NOT EXISTS holdfast.settings (name text PRIMARY KEY, value text NOT NULL);
CREATE TABLE IF NOT EXISTS holdfast.documents (
    name bytea PRIMARY KEY, version text NOT NULL, content bytea, position bigint);
CREATE TABLE IF NOT EXISTS holdfast.entries (
    stream bytea NOT NULL, position bigint NOT NULL, content bytea NOT NULL, PRIMARY KEY (stream, position));
CREATE TABLE IF NOT EXISTS holdfast.commits (
    id text PRIMARY KEY, made boolean NOT NULL, at timestamptz NOT NULL, number bigint, names bytea[],
    CONSTRAINT this_store_needs_a_newer_holdfast CHECK (names IS NOT NULL));
CREATE INDEX IF NOT EXISTS commits_number ON holdfast.commits (number);
CREATE TABLE IF NOT EXISTS holdfast.watchers (id text PRIMARY KEY, until timestamptz NOT NULL);
"""

FOUND_VERSION = "SELECT value FROM holdfast.settings WHERE name = 'schema_version'"
NOTE_VERSION = """
INSERT INTO holdfast.settings (name, value) VALUES ('schema_version', %s) ON CONFLICT (name) DO NOTHING"""

UPGRADE = (
    "UPDATE holdfast.settings SET value = '2' WHERE name = 'schema_version' AND value = '1'",
    "ALTER TABLE holdfast.commits ADD COLUMN number bigint",
    "ALTER TABLE holdfast.commits ADD COLUMN names bytea[]",
    "ALTER TABLE holdfast.commits ADD CONSTRAINT this_store_needs_a_newer_holdfast CHECK (names IS NOT NULL) NOT VALID",
    "CREATE INDEX commits_number ON holdfast.commits (number)",
)
"""The upgrade from version 1, in one transaction. If two clients try it, the second waits for the first in its first
statement, and fails in its next one: the column exists. Connected clients of version 1 can still read; their next
commit is refused, because its note has no names."""

NOW = "SELECT extract(epoch FROM clock_timestamp())::float8"

FETCH = """
SELECT extract(epoch FROM clock_timestamp())::float8,
    d.name, d.version, coalesce(d.content, e.content), d.position
FROM (SELECT 1 AS one) AS always
LEFT JOIN holdfast.documents AS d ON d.name = ANY(%s::bytea[])
LEFT JOIN holdfast.entries AS e ON e.stream = d.name AND e.position = d.position"""
"""One statement, so everything is as of one instant. The result always has a row, for the time."""

FETCH_ONE = """
SELECT extract(epoch FROM clock_timestamp())::float8, d.version, d.content
FROM (SELECT 1 AS one) AS always LEFT JOIN holdfast.documents AS d ON d.name = %s"""
"""`FETCH` for a single document."""

TAKE_TURN = """
BEGIN;
SET LOCAL lock_timeout TO %(limit)s;
SET LOCAL idle_in_transaction_session_timeout TO %(limit)s;
SELECT name FROM holdfast.documents WHERE name = ANY(%(names)s::bytea[]) ORDER BY name FOR UPDATE;
"""
"""Contenders queue for the rows, in the order of names. The server limits both the wait and the time of a turn."""


def _bytes(text: str) -> str:
    return f"'\\x{text.encode().hex()}'::bytea"


def _value(field: str, length: int, indent: int = 2) -> str:
    """The first bytes of a string in the content of a document. Never fails, whatever the content is."""
    start = field_start(field, indent)
    return f"substring(content FROM position({_bytes(start)} IN content) + {len(start)} FOR {length})"


def _match(value: str, results: Mapping[str, int]) -> str:
    cases = (f"WHEN {_bytes(each)} THEN {result}" for each, result in results.items())
    return f"CASE {value} {' '.join(cases)} ELSE 0 END"


_STATE = _match(_value("state", 5), served.STATES)
_RANK = _match(_value("priority", 4), served.RANKS)
_QUOTE = _bytes('"')
_CREATED, _UPDATED = _value("created_at", 32), _value("updated_at", 32)
_CHANGED = f"CASE substring({_UPDATED} FOR 1) WHEN {_QUOTE} THEN {_CREATED} ELSE {_UPDATED} END"
_IS_FREE = f"""name > 'jit/issues/' AND name < 'jit/issues0' AND content IS NOT NULL AND ({_STATE} = 0
    OR {_STATE} = {served.WAITING} AND position({_bytes(served.WAITS_FOR_NOTHING)} IN content) > 0)"""
_EXPIRY = _value("expires_at", 27, 4)
_MAY_EXPIRE = f"""name > 'jit/claims/' AND name < 'jit/claims0'
    AND position({_bytes(field_start("expires_at", 4))} IN content) > 0
    AND position({_bytes(field_start("held_for", 4))} IN content) = 0"""

CREATE_QUEUE = (
    "SET LOCAL statement_timeout TO 0",
    f"""CREATE INDEX IF NOT EXISTS issues_free
    ON holdfast.documents (({_RANK}), ({_CHANGED}), ({_CREATED}), name) WHERE {_IS_FREE}""",
    f"CREATE INDEX IF NOT EXISTS claims_expiry ON holdfast.documents (({_EXPIRY})) WHERE {_MAY_EXPIRE}",
    "INSERT INTO holdfast.settings (name, value) VALUES ('queue', 'index') ON CONFLICT (name) DO NOTHING",
)
FOUND_QUEUE = "SELECT value FROM holdfast.settings WHERE name = 'queue'"
"""The queue of issues: two indexes of what the documents say, so a commit cannot forget it, whichever client makes it.
Like `commits_at`, they are not part of the schema version. Issues are in the order of `rules.UrgencyOrder`; those that
cannot be understood come first, and then the client decides by itself."""

PICK = f"""
SELECT extract(epoch FROM clock_timestamp())::float8,
    free.name, free.version, free.document, claim.version, claim.content,
    (claim.name IS NULL OR locked.name IS NOT NULL) AND free.rank > 0 AND NOT EXISTS (
        SELECT FROM (
            SELECT substring(name FROM {len(served.CLAIMS) + 1}) AS member FROM holdfast.documents
            WHERE {_MAY_EXPIRE} AND {_EXPIRY} < to_char(
                statement_timestamp() AT TIME ZONE 'UTC' - %(skew)s * interval '1 second',
                'YYYY-MM-DD"T"HH24:MI:SS.US"Z"')::bytea) AS expired
        JOIN holdfast.documents ON name = '{served.ISSUES}'::bytea || expired.member
        WHERE {_STATE} = {served.IN_PROGRESS}
            AND ({_RANK}, {_CHANGED}, {_CREATED}, name) < (free.rank, free.changed, free.created, free.name))
FROM (
    SELECT name, version, content AS document, {_RANK} AS rank, {_CHANGED} AS changed, {_CREATED} AS created
    FROM holdfast.documents
    WHERE {_IS_FREE} AND (position({_bytes(field_start("assignee"))} IN content) = 0
        OR position(%(own)s::bytea IN content) > 0)
    ORDER BY {_RANK}, {_CHANGED}, {_CREATED}, name LIMIT 1 FOR UPDATE SKIP LOCKED) AS free
LEFT JOIN holdfast.documents AS claim
    ON claim.name = '{served.CLAIMS}'::bytea || substring(free.name FROM {len(served.ISSUES) + 1})
LEFT JOIN LATERAL (
    SELECT name FROM holdfast.documents WHERE name = claim.name FOR UPDATE SKIP LOCKED) AS locked ON true"""
"""Locks the first free issue that nobody else has locked, with its claim, and returns both; at last, whether it may be
claimed: its claim is locked too (a commit that has locked the claim would wait for the issue, and this one's commit for
the claim), its priority is known, and no more urgent issue has a claim that has expired."""

COMMIT = """
WITH held AS (
    SELECT d.name FROM holdfast.documents AS d
    JOIN unnest(%(names)s::bytea[], %(versions)s::text[]) AS n (name, version)
        ON d.name = n.name AND d.version = n.version
    ORDER BY d.name FOR UPDATE OF d
), fits AS (
    SELECT count(*) = %(count)s::bigint
        AND NOT EXISTS (SELECT 1 FROM holdfast.settings WHERE name = 'moved_to') AS yes FROM held
), put AS (
    INSERT INTO holdfast.documents AS d (name, version, content, position)
    SELECT p.name, p.version, p.content, p.position
    FROM unnest(%(put)s::bytea[], %(new_versions)s::text[], %(contents)s::bytea[], %(positions)s::bigint[])
        AS p (name, version, content, position)
    CROSS JOIN fits WHERE fits.yes ORDER BY p.name
    ON CONFLICT (name) DO UPDATE SET
        version = CASE WHEN d.version = ANY(%(versions)s::text[]) THEN excluded.version END,
        content = excluded.content, position = excluded.position
), added AS (
    INSERT INTO holdfast.entries (stream, position, content)
    SELECT a.stream, a.position, a.content
    FROM unnest(%(streams)s::bytea[], %(places)s::bigint[], %(records)s::bytea[])
        AS a (stream, position, content)
    CROSS JOIN fits WHERE fits.yes
), noted AS (
    INSERT INTO holdfast.commits (id, made, at, number, names)
    SELECT %(id)s, true, clock_timestamp(), pg_current_xact_id()::text::bigint, %(documents)s::bytea[]
    FROM fits WHERE fits.yes
)
SELECT fits.yes FROM fits"""
"""A whole commit in one statement, which is its own transaction.

`held` locks the rows that the commit depends on, in the order of names, except those whose version has changed; if any
is missing, nothing is written. A name without a row may have got one since the fetch. Its version is not among the
fetched ones (a reader that sees one document of a commit sees all of them), so `put` sets it to null. The column
refuses null, so the whole statement fails. (The empty version may have been fetched, but it means no document.)
"""

COMMIT_ONE = """
WITH fits AS (
    UPDATE holdfast.documents SET version = %(id)s, content = %(content)s
    WHERE name = %(name)s AND version = %(version)s
        AND NOT EXISTS (SELECT 1 FROM holdfast.settings WHERE name = 'moved_to') RETURNING true AS yes
), noted AS (
    INSERT INTO holdfast.commits (id, made, at, number, names)
    SELECT %(id)s, true, clock_timestamp(), pg_current_xact_id()::text::bigint, ARRAY[%(name)s::bytea] FROM fits
)
SELECT fits.yes FROM fits"""
"""A commit of one document that depends on nothing else: the row that it updates is the row that it compares. Returns
no row if the version has changed."""


def notifying(commit: str) -> str:
    """A commit that notifies watchers, but only if there are any: commits that notify wait for each other."""
    return commit.replace(
        "SELECT fits.yes FROM fits",
        """SELECT fits.yes, CASE
    WHEN fits.yes AND EXISTS (SELECT 1 FROM holdfast.watchers WHERE until > clock_timestamp())
    THEN pg_notify(%(channel)s, %(changed)s) END FROM fits""",
    )


def sealing(commit: str) -> str:
    """A commit that adds loose records to their stream. Allowed even after the store was moved: it adds nothing new."""
    before, _, rest = commit.partition("    INSERT INTO holdfast.entries")
    not_moved = "AND NOT EXISTS (SELECT 1 FROM holdfast.settings WHERE name = 'moved_to')"
    return (
        before.replace(not_moved, "")
        + """    UPDATE holdfast.entries AS e SET stream = a.stream, position = a.position, content = a.content
    FROM unnest(%(streams)s::bytea[], %(places)s::bigint[], %(records)s::bytea[], %(loose)s::bytea[],
        %(loose_places)s::bigint[]) AS a (stream, position, content, loose, place)
    CROSS JOIN fits WHERE fits.yes AND e.stream = a.loose AND e.position = a.place
), noted AS ("""
        + rest.partition("\n), noted AS (")[2]
    )


SEAL = sealing(COMMIT)
COMMIT_AND_NOTIFY = notifying(COMMIT)
COMMIT_ONE_AND_NOTIFY = notifying(COMMIT_ONE)

MOVED_TO = "SELECT value FROM holdfast.settings WHERE name = 'moved_to'"
SET_MOVED = """
INSERT INTO holdfast.settings (name, value) VALUES ('moved_to', %s)
ON CONFLICT (name) DO UPDATE SET value = excluded.value"""
UNSET_MOVED = "DELETE FROM holdfast.settings WHERE name = 'moved_to'"
WAIT_FOR_COMMITS = "LOCK TABLE holdfast.commits IN SHARE ROW EXCLUSIVE MODE"
"""Waits for commits in progress and makes later ones wait. A statement takes its snapshot after its table locks, so the
later ones see what this transaction sets. Distributed databases have no such lock; they serialize commits instead."""


@functools.cache
def unnumbered(commit: str) -> str:
    """A commit for a server whose transactions have no numbers."""
    return commit.replace("pg_current_xact_id()::text::bigint", "NULL::bigint")


RULE_OUT = """
INSERT INTO holdfast.commits (id, made, at, names) VALUES (%s, false, clock_timestamp(), '{}')
ON CONFLICT (id) DO NOTHING"""
"""Waits for a commit with this id that is in progress, and rules it out unless it was made."""

WAS_MADE = "SELECT made FROM holdfast.commits WHERE id = %s"

FORGET = """
DELETE FROM holdfast.commits WHERE id IN (
    SELECT id FROM holdfast.commits WHERE at < now() - interval '7 days' ORDER BY at LIMIT 2000)"""
"""A lost answer is looked up within seconds, so a week is ample. The limit is twice the number of new notes between two
runs, so that a backlog shrinks. A cursor becomes unknown (`CHANGES`) before a note that it needs can be deleted."""

NEWEST = """
SELECT (pg_snapshot_xmin(pg_current_snapshot()))::text::bigint, extract(epoch FROM clock_timestamp())::float8,
    ARRAY(SELECT id FROM holdfast.commits WHERE made AND number IS NOT NULL ORDER BY number DESC LIMIT 4)"""
"""The lowest number that may still be in use, and the last commits. A cursor names these commits so that a database
restored from an older copy is recognised: there, other commits have their numbers."""

CHANGES = (
    """
WITH known AS (
    SELECT count(*) = cardinality(%(last)s::text[]) AS yes FROM holdfast.commits
    WHERE made AND id = ANY(%(last)s::text[]) AND at > now() - interval '6 days'
), since AS (
    SELECT DISTINCT name FROM holdfast.commits AS c CROSS JOIN known CROSS JOIN LATERAL unnest(c.names) AS name
    WHERE known.yes AND c.number >= %(number)s::bigint AND name > %(start)s AND name < %(end)s
)
SELECT newest.*, known.yes, d.name, d.version, d.content
FROM known CROSS JOIN ("""
    + NEWEST
    + """) AS newest (number, now, last)
LEFT JOIN (since CROSS JOIN LATERAL (
    SELECT d.name, d.version, d.content FROM holdfast.documents AS d WHERE d.name = since.name OFFSET 0) AS d)
    ON true"""
)
"""One statement, so everything is as of one instant. Every transaction with a number below the cursor's had ended when
the cursor was made, so its changes were seen then. The result always has a row. `OFFSET 0` has the documents looked up
one by one: without it, a server that has no statistics yet reads the whole family."""

FOUND_INDEX = "SELECT value FROM holdfast.settings WHERE name = 'commits_at'"
CREATE_INDEX = "CREATE INDEX IF NOT EXISTS commits_at ON holdfast.commits (at)"
NOTE_INDEX = "INSERT INTO holdfast.settings (name, value) VALUES ('commits_at', 'index') ON CONFLICT (name) DO NOTHING"
"""The index is not part of the schema version: a store works without it. `CREATE INDEX` waits for writers even if the
index exists, so its existence is noted in the settings."""

PAGE = """
SELECT name, version, content FROM holdfast.documents
WHERE name > %s AND name < %s AND content IS NOT NULL ORDER BY name LIMIT %s"""

PAGE_OF_STREAM = """
SELECT position, content FROM holdfast.entries WHERE stream = %s AND position > %s ORDER BY position LIMIT %s"""

BURY = """
WITH upgraded AS (UPDATE holdfast.settings SET value = '3' WHERE name = 'schema_version' AND value = '2')
UPDATE holdfast.entries SET content = %s WHERE stream = %s AND position = %s"""
DROP_RECORDS = "DELETE FROM holdfast.entries WHERE stream = %s AND position BETWEEN %s AND %s"

LAST_LOOSE = "SELECT coalesce(max(position), 0) FROM holdfast.entries WHERE stream = %s"
VERSION = "SELECT name, version FROM holdfast.documents WHERE name = %s AND version <> ''"
FAMILY_VERSIONS = "SELECT name, version FROM holdfast.documents WHERE name > %s AND name < %s AND version <> ''"

REGISTER = """
INSERT INTO holdfast.watchers (id, until) VALUES (%s, clock_timestamp() + interval '60 seconds')
ON CONFLICT (id) DO UPDATE SET until = excluded.until"""
UNREGISTER = "DELETE FROM holdfast.watchers WHERE id = %s OR until < clock_timestamp() - interval '1 day'"

CREATE_CONTENT = """
CREATE TABLE IF NOT EXISTS holdfast.content (
    hash bytea NOT NULL, upload bytea NOT NULL, data bytea NOT NULL, created_at timestamptz NOT NULL,
    PRIMARY KEY (hash, upload))"""
"""The table of chunks (`content_postgres`). It is not part of the schema version: most stores work without it."""

CHUNK_NAMES = "SELECT hash, upload FROM holdfast.content WHERE hash = ANY(%s::bytea[])"
PUT_CHUNKS = """
INSERT INTO holdfast.content (hash, upload, data, created_at)
SELECT c.hash, c.upload, c.data, clock_timestamp()
FROM unnest(%s::bytea[], %s::bytea[], %s::bytea[]) AS c (hash, upload, data) ON CONFLICT (hash, upload) DO NOTHING"""
GET_CHUNKS = """
SELECT c.hash, c.upload, c.data FROM holdfast.content AS c
JOIN unnest(%s::bytea[], %s::bytea[]) AS n (hash, upload) ON c.hash = n.hash AND c.upload = n.upload"""
PAGE_OF_CHUNKS = """
SELECT hash, upload FROM holdfast.content WHERE (hash, upload) > (%s, %s) ORDER BY hash, upload LIMIT %s"""
DELETE_CHUNKS = """
DELETE FROM holdfast.content AS c USING unnest(%s::bytea[], %s::bytea[]) AS n (hash, upload)
WHERE c.hash = n.hash AND c.upload = n.upload"""
