"""The issue tracker: creating, updating and listing, compared with SQLite and with bare JSON files without locks.

The bare files are the unsafe floor: durable replacement, but no protection against concurrent writers; lost
updates are counted. SQLite runs with WAL and synchronous=FULL, and writes an issue and its event as rows of
one transaction.
"""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
import sys
import tempfile
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from statistics import median
from time import monotonic, perf_counter, sleep
from typing import Any, ClassVar, NamedTuple

from bench.crew import Crew
from bench.report import Column, Report, Table, at_most, number
from holdfast.issues.creating import NewIssue
from holdfast.issues.tracker import Tracker, Update
from holdfast.issues.validate import repair
from holdfast.locks.retry import RetryConfig
from holdfast.store.files import FileStore

PROCESSES = (1, 8, 32)
COMMANDS = {"ready": ["ready"], "issue list": ["issue", "list"], "issue claim-next": ["issue", "claim-next"]}
"""Each is run from a cold start; the last one also claims an issue."""

MILLI = 1e3
SETTLED = 2.1  # seconds after which a changed file is no longer read again


class Size(NamedTuple):
    """How much to measure; durations in seconds."""

    crew_seconds: float = 2.0
    counts: tuple[int, ...] = (100, 1_000, 10_000)
    large: tuple[int, ...] = (1, 1_000, 100_000)
    rounds: int = 7


FULL = Size()
QUICK = Size(crew_seconds=0.2, counts=(20, 100), large=(1, 100), rounds=2)


class Contender(ABC):
    """A tracker of issues with a title, a state and a counter."""

    name: ClassVar[str]

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    @abstractmethod
    def make(self, count: int) -> list[str]:
        """Create the initial issues; return their ids."""

    @abstractmethod
    def create(self) -> None:
        """Create one more issue, durably."""

    @abstractmethod
    def update(self, issue: str) -> None:
        """Increment the counter of an issue, durably."""

    @abstractmethod
    def counted(self) -> tuple[int, int]:
        """The number of issues, and the sum of their counters."""

    @abstractmethod
    def ready(self) -> int:
        """The number of issues that are ready."""


class Ours(Contender):
    """`Tracker` on files."""

    name = "holdfast"

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        retry = RetryConfig(max_attempts=100, initial_delay=0.001)
        self.tracker = Tracker(FileStore(directory, timeout=60.0), actor="agent:bench", retry=retry)
        self.tracker.initialise()

    def make(self, count: int) -> list[str]:
        created = self.tracker.create_all([NewIssue(title=f"issue {n}", description="x" * 200) for n in range(count)])
        return [each.issue.id for each in created]

    def create(self) -> None:
        self.tracker.create(NewIssue(title="one more"))

    def update(self, issue: str) -> None:
        self.tracker.update(issue, Update(increments={"n": 1}))

    def counted(self) -> tuple[int, int]:
        issues = list(self.tracker.snapshot())
        return len(issues), sum(int(issue.context.get("n", 0)) for issue in issues)

    def ready(self) -> int:
        return len(self.tracker.snapshot().ready())


class Sqlite(Contender):
    """SQLite with WAL and synchronous=FULL."""

    name = "SQLite (WAL, FULL)"

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.connection = sqlite3.connect(directory / "issues.db", timeout=60.0, isolation_level=None)
        for statement in (
            "PRAGMA journal_mode=WAL",
            "PRAGMA synchronous=FULL",
            "CREATE TABLE IF NOT EXISTS issues (id TEXT PRIMARY KEY, state TEXT, record TEXT)",
            "CREATE TABLE IF NOT EXISTS events (record TEXT)",
        ):
            self.connection.execute(statement)

    def make(self, count: int) -> list[str]:
        records = [_record(n) for n in range(count)]
        self.connection.execute("BEGIN IMMEDIATE")
        rows = [(each["id"], "ready", json.dumps(each)) for each in records]
        self.connection.executemany("INSERT INTO issues VALUES (?, ?, ?)", rows)
        self.connection.execute("COMMIT")
        return [each["id"] for each in records]

    def create(self) -> None:
        record = _record(0)
        self.connection.execute("BEGIN IMMEDIATE")
        row = (record["id"], "ready", json.dumps(record))
        self.connection.execute("INSERT INTO issues VALUES (?, ?, ?)", row)
        self._event("issue_created", record["id"])
        self.connection.execute("COMMIT")

    def update(self, issue: str) -> None:
        self.connection.execute("BEGIN IMMEDIATE")
        [(text,)] = self.connection.execute("SELECT record FROM issues WHERE id = ?", (issue,)).fetchall()
        record = _counted(json.loads(text))
        self.connection.execute("UPDATE issues SET record = ? WHERE id = ?", (json.dumps(record), issue))
        self._event("issue_updated", issue)
        self.connection.execute("COMMIT")

    def counted(self) -> tuple[int, int]:
        records = [json.loads(text) for (text,) in self.connection.execute("SELECT record FROM issues")]
        return len(records), sum(int(each["context"].get("n", 0)) for each in records)

    def ready(self) -> int:
        rows = self.connection.execute("SELECT record FROM issues WHERE state = 'ready'").fetchall()
        return len([json.loads(text) for (text,) in rows])

    def _event(self, kind: str, issue: str) -> None:
        self.connection.execute("INSERT INTO events VALUES (?)", (json.dumps({"type": kind, "issue_id": issue}),))


class BareFiles(Contender):
    """JSON files without any lock: concurrent updates may be lost."""

    name = "bare files, no locks (unsafe)"

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        (directory / "issues").mkdir(exist_ok=True)
        if not (directory / "index.json").exists():
            _replace(directory / "index.json", {"all_ids": []})

    def make(self, count: int) -> list[str]:
        records = [_record(n) for n in range(count)]
        for each in records:
            (self.directory / f"issues/{each['id']}.json").write_text(json.dumps(each, indent=2))
        _replace(self.directory / "index.json", {"all_ids": [each["id"] for each in records]})
        return [each["id"] for each in records]

    def create(self) -> None:
        record = _record(0)
        _replace(self.directory / f"issues/{record['id']}.json", record)
        index = json.loads((self.directory / "index.json").read_text())
        _replace(self.directory / "index.json", {"all_ids": [*index["all_ids"], record["id"]]})
        self._event("issue_created", record["id"])

    def update(self, issue: str) -> None:
        path = self.directory / f"issues/{issue}.json"
        _replace(path, _counted(json.loads(path.read_text())))
        self._event("issue_updated", issue)

    def counted(self) -> tuple[int, int]:
        records = self._records()
        return len(records), sum(int(each["context"].get("n", 0)) for each in records)

    def ready(self) -> int:
        return len([each for each in self._records() if each["state"] == "ready"])

    def _records(self) -> list[dict[str, Any]]:
        ids = json.loads((self.directory / "index.json").read_text())["all_ids"]
        return [json.loads((self.directory / f"issues/{each}.json").read_text()) for each in ids]

    def _event(self, kind: str, issue: str) -> None:
        with (self.directory / "events.jsonl").open("a") as file:
            file.write(json.dumps({"type": kind, "issue_id": issue}) + "\n")
            file.flush()
            os.fsync(file.fileno())


KINDS: tuple[type[Contender], ...] = (Ours, Sqlite, BareFiles)


def run(*, quick: bool) -> Report:
    """Run the whole suite."""
    report, size = Report(), QUICK if quick else FULL
    if sys.platform == "win32":
        report.notes.append("issues: the floor needs directories that can be synced; nothing was measured")
        return report
    with tempfile.TemporaryDirectory(prefix="holdfast-bench-", dir=Path.cwd()) as directory:
        together(Path(directory), size, report)
        listing(Path(directory), size, report)
        growing(Path(directory), size, report)
    return report


def together(directory: Path, size: Size, report: Report) -> None:
    """Several processes create issues, update the same issue, or update one each."""
    titles = [f"{count} {what}" for count in PROCESSES for what in ("create", "same", "own")]
    table = Table(
        "creates/s, updates/s of the same issue, updates/s of own issues; by the number of processes",
        [Column(title, number(",.0f")) for title in titles],
    )
    table.rows = {kind.name: [] for kind in KINDS}
    for count in PROCESSES:
        _say(f"{count} processes")
        with Crew(count) as crew:
            for kind in KINDS:
                for what in ("create", "same", "own"):
                    place = directory / f"{kind.__name__}-{count}-{what}"
                    place.mkdir()
                    ids = kind(place).make(count)
                    done = sum(crew.all_do(_prepare, kind, place, what, ids, seconds=size.crew_seconds))
                    table.rows[kind.name].append(done / size.crew_seconds)
                    _check(kind, place, what, count, done, report)
    report.tables.append(table)


def _prepare(kind: type[Contender], place: Path, what: str, ids: list[str]) -> Callable[[float], int]:
    each = kind(place)
    issue = ids[0] if what == "same" else _own(place, ids)

    def work(end_at: float) -> int:
        done = 0
        while monotonic() < end_at:
            with suppress(json.JSONDecodeError, FileNotFoundError):  # races of the unsafe contender
                each.create() if what == "create" else each.update(issue)
            done += 1
        return done

    return work


def _own(place: Path, ids: list[str]) -> str:
    """One of the issues that no other process has taken."""
    for issue in ids:
        with suppress(FileExistsError):
            os.close(os.open(place / f"taken-{issue}", os.O_CREAT | os.O_EXCL))
            return issue
    raise AssertionError("there are more processes than issues")


def _check(kind: type[Contender], place: Path, what: str, before: int, done: int, report: Report) -> None:
    issues, counts = kind(place).counted()
    found = issues - before if what == "create" else counts
    if found != done:
        report.notes.append(f"{kind.name}: {done - found} of {done} ({what}, {before} processes) were lost")


def listing(directory: Path, size: Size, report: Report) -> None:
    """Find ready issues: in a running process, and by a command from a cold start."""
    columns = [Column(f"{count:,} issues", number(".1f")) for count in size.counts]
    table = Table("ms to find ready issues, and to update one issue, by the number of issues", columns)
    names = [f"holdfast {name} (cold start, CPU)" for name in COMMANDS]
    updating = "holdfast update of one"
    table.rows = {name: [] for name in (*(f"{kind.name}, running" for kind in KINDS), *names, updating)}
    updates: list[float] = []
    for count in size.counts:
        _say(f"{count} issues")
        for kind in KINDS:
            place = directory / f"{kind.__name__}-list-{count}"
            place.mkdir()
            each = kind(place)
            ids = each.make(count)
            assert each.ready() == count
            table.rows[f"{kind.name}, running"].append(_timed(each.ready, size.rounds) * MILLI)
            if isinstance(each, Ours):
                commands = [_command(place, *words) for words in COMMANDS.values()]
                sleep(SETTLED)
                commands[0]()  # until then, recent files are read again
                cold = [_timed(command, size.rounds, clock=_used) for command in commands]
                change = partial(_update_all, each, ids[:: max(1, count // 100)])
                changed = [_timed(command, size.rounds, change, _used) for command in commands]
                for name, seconds in zip(names, cold, strict=True):
                    table.rows[name].append(seconds * MILLI)
                updates.append(_timed(lambda each=each, one=ids[0]: each.update(one), 5 * size.rounds))  # type: ignore[misc]
                table.rows[updating].append(updates[-1] * MILLI)
    report.tables.append(table)
    most = f"{size.counts[-1]:,}"
    base = _empty_interpreter(size)
    report.targets += [
        at_most(8, f"'{name}' of {most} unchanged issues ≤ 8 x 'python -c pass'", seconds / base)
        for name, seconds in zip(COMMANDS, cold, strict=True)
    ]
    report.targets += [
        at_most(1.2, f"'{name}' of {most} issues, 100 of them changed ≤ 1.2 x unchanged", after / before)
        for name, before, after in zip(COMMANDS, cold, changed, strict=True)
    ]
    text = f"updating one of {most} issues ≤ 1.5 x updating one of {size.counts[0]}"
    report.targets.append(at_most(1.5, text, updates[-1] / updates[0]))


def growing(directory: Path, size: Size, report: Report) -> None:
    """Create and show an issue in a large tracker, which costs the same as in a small one."""
    columns = [Column(f"{count:,} issues", number(".1f")) for count in size.large]
    table = Table("ms to create an issue, and to show one by its short id, by the number of issues", columns)
    rows: dict[str, list[float]] = {"holdfast create": [], "holdfast issue show (cold start)": []}
    for count in size.large:
        _say(f"{count} issues of another program")
        place = directory / f"Ours-large-{count}"
        place.mkdir()
        ids, ours = _write_foreign(place / ".jit", count), Ours(place)
        repair(ours.tracker)  # records the dependents, which other programs do not
        ours.create()  # finds out how large the index is
        create, show = _timed(ours.create, 5 * size.rounds), _command(place, "issue", "show", ids[0][:13])
        for row, seconds in zip(rows.values(), (create, _timed(show, size.rounds)), strict=True):
            row.append(seconds)
    _cold(place, size, report)
    table.rows = {name: [seconds * MILLI for seconds in row] for name, row in rows.items()}
    report.tables.append(table)
    for (name, row), most in zip(rows.items(), (1.3, 1.5), strict=True):
        text = f"{name} with {size.large[-1]:,} issues ≤ {most} x with {size.large[0]:,}"
        report.targets.append(at_most(most, text, row[-1] / row[0]))


def _cold(place: Path, size: Size, report: Report) -> None:
    """Run the commands from a cold start in the largest tracker."""
    base, most = _empty_interpreter(size), f"{size.large[-1]:,}"
    sleep(SETTLED)
    _command(place, "ready")()  # until then, recent files are read again
    for name, words in COMMANDS.items():
        used = _timed(_command(place, *words), size.rounds, clock=_used) / base
        report.targets.append(at_most(25, f"'{name}' of {most} issues ≤ 25 x 'python -c pass'", used))
        report.targets.append(at_most(200, f"'{name}' of {most} issues: memory ≤ 200 MB", _peak(place, *words), "MB"))


def _empty_interpreter(size: Size) -> float:
    return _timed(lambda: subprocess.run([sys.executable, "-c", "pass"], check=True), size.rounds, clock=_used)


def _write_foreign(jit: Path, count: int) -> list[str]:
    """A tracker of another program: issues and the index. Creating as many one by one would take too long."""
    (jit / "issues").mkdir(parents=True)
    records = [_record(n) for n in range(count)]
    for each in records:
        (jit / f"issues/{each['id']}.json").write_text(json.dumps(each, indent=2))
    ids = [str(each["id"]) for each in records]
    (jit / "index.json").write_text(json.dumps({"schema_version": 2, "all_ids": ids}, indent=2))
    return ids


def _command(place: Path, *words: str) -> Callable[[], object]:
    command = [sys.executable, "-m", "holdfast", *words, "--repo", str(place)]
    return lambda: subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


_MEASURE = """
import resource, subprocess, sys
subprocess.run(sys.argv[1:], check=True, stdout=subprocess.DEVNULL)
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)
"""


def _peak(place: Path, *words: str) -> float:
    """The most memory that a command used, in MB. A small process starts it, because the memory of the process that
    starts a command is counted too."""
    command = [sys.executable, "-c", _MEASURE, sys.executable, "-m", "holdfast", *words, "--repo", str(place)]
    used = int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    return used / (1e6 if sys.platform == "darwin" else 1e3)


def _update_all(tracker: Contender, ids: list[str]) -> None:
    for each in ids:
        tracker.update(each)


def _used() -> float:
    """The CPU seconds of all commands so far: unlike the time on the wall, it hardly depends on other programs."""
    import resource

    return sum(resource.getrusage(resource.RUSAGE_CHILDREN)[:2])


def _timed(
    act: Callable[[], object],
    rounds: int,
    prepare: Callable[[], object] = int,
    clock: Callable[[], float] = perf_counter,
) -> float:
    found = []
    for _ in range(rounds):
        prepare()
        started = clock()
        act()
        found.append(clock() - started)
    return median(found)


def _record(n: int) -> dict[str, Any]:
    record = {"id": str(uuid.uuid4()), "title": f"issue {n}", "description": "x" * 200, "state": "ready"}
    return {**record, "priority": "normal", "dependencies": [], "context": {}, "labels": []}


def _counted(record: dict[str, Any]) -> dict[str, Any]:
    record["context"]["n"] = str(int(record["context"].get("n", 0)) + 1)
    return record


def _replace(path: Path, record: object) -> None:
    draft = path.with_suffix(f".{os.getpid()}.tmp")
    fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
    os.write(fd, json.dumps(record, indent=2).encode())
    os.fsync(fd)
    os.close(fd)
    os.replace(draft, path)
    directory = os.open(path.parent, os.O_RDONLY)
    os.fsync(directory)
    os.close(directory)


def _say(what: str) -> None:
    print(f"issues: {what} ...", file=sys.stderr, flush=True)
