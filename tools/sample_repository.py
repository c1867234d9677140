"""A sample repository in the middle of its work, for tests and pictures of the pages.

The records are made by the library, in this process; the agents are processes that sleep.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from holdfast.issues.creating import NewIssue
from holdfast.issues.gates import Definition
from holdfast.issues.model import ClaimId, GateStatus, Priority, State
from holdfast.issues.tracker import Tracker, Update
from holdfast.locks.identity import Holder, holder_with_pid
from holdfast.repository.git_init import adopt_checkout
from holdfast.repository.landing import Landings, LandOptions
from holdfast.repository.landing_checks import check_runs
from holdfast.repository.landing_records import Landing
from holdfast.repository.ledgers import init_ledger
from holdfast.repository.opening import open_tracker
from holdfast.repository.repository import Repository
from holdfast.repository.settings import CHECKS, change

_GIT = ("git", "-c", "user.name=Ada", "-c", "user.email=ada@example.com", "-c", "init.defaultBranch=main")

ISSUES = (
    ("parser", "Parse durations with units", Priority.HIGH, (), ("area:core",)),
    ("clock", "Inject the clock everywhere", Priority.NORMAL, (), ("area:core",)),
    ("retry", "Retry with backoff and jitter", Priority.NORMAL, ("clock",), ("area:core",)),
    ("store", "Store documents on PostgreSQL", Priority.HIGH, ("parser",), ("area:store",)),
    ("watch", "Watch documents by notification", Priority.NORMAL, ("store",), ("area:store",)),
    ("lease", "Fence every commit with a token", Priority.CRITICAL, ("clock", "store"), ("area:leases",)),
    ("queue", "Serve waiters in turn", Priority.NORMAL, ("lease",), ("area:leases",)),
    ("docs", "Explain the commit point in the docs", Priority.LOW, (), ("docs",)),
    ("help", "Wrap long lines in help", Priority.LOW, (), ("docs",)),
    ("web", "Show who does what in a browser", Priority.HIGH, ("watch",), ("area:web",)),
    ("release", "Release 1.0", Priority.NORMAL, ("queue", "web", "docs"), ()),
    ("gate", "Measure the cost of a commit", Priority.NORMAL, (), ("bench",)),
)
"""Key, title, priority, dependencies and labels of the sample issues."""


class Sample(NamedTuple):
    """The sample: its checkout, the root of its records, and ids: of its issues by key, its check runs, and the entries
    of its landing queues."""

    checkout: Path
    root: Path
    issues: dict[str, str]
    runs: tuple[str, ...]
    entries: tuple[str, ...]


@contextlib.contextmanager
def sample_repository(place: Path) -> Iterator[Sample]:
    """A sample below `place`, with agents that are alive until the end."""
    checkout = place / "harbour"
    _checkout(checkout)
    root = Path(adopt_checkout(checkout).root)
    with contextlib.ExitStack() as stack:
        tracker = open_tracker(root, actor="human:ada")
        tracker.initialise()
        issues = _issues(tracker)
        _agents(stack, root, tracker, issues)
        _ledger(root)
        repository = _opened(stack, root, "human:ada")
        runs = tuple(each.run_id for each in check_runs(repository.context.paths))
        entries = tuple(each.landing_id for each in Landings(repository, actor="human:ada").all())
        yield Sample(checkout, root, issues, runs, entries)


def many_issues(place: Path, count: int) -> Path:
    """A tracker with issues in layers, each but the first depending on one or two of the layer before."""
    root = place / "fleet"
    root.mkdir()
    tracker = open_tracker(root, actor="human:ada")
    tracker.initialise()
    wide, parts = count // 12, [each[1] for each in ISSUES]
    new = [
        NewIssue(
            key=str(number),
            title=f"{parts[number % len(parts)]}, part {number}",
            depends_on=tuple({str(number - wide), str(number - wide - number % 3)}) if number >= wide + 2 else (),
        )
        for number in range(count)
    ]
    made = [each.issue.id for start in range(0, count, 500) for each in tracker.create_all(new[start : start + 500])]
    for issue_id in made[: wide * 2]:
        tracker.update(issue_id, Update(state=State.DONE))
    return root


def _checkout(path: Path) -> None:
    path.mkdir(parents=True)
    _git(path, "init", "-q")
    (path / "README.md").write_text("# Harbour\n\nA place for ships.\n")
    (path / "durations.py").write_text(_DURATIONS)
    _git(path, "config", "user.name", "Ada")
    _git(path, "config", "user.email", "ada@example.com")
    _git(path, "add", ".")
    _git(path, "commit", "-qm", "Begin")


_DURATIONS = '''"""Durations as text."""

UNITS = {"s": 1, "m": 60}


def parse(text):
    return float(text[:-1]) * UNITS[text[-1]]
'''
_BETTER = '''"""Durations as text: `250ms`, `30s`, `1m30s`."""

import re

UNITS = {"ms": 0.001, "s": 1, "m": 60, "h": 3600}
PART = re.compile(r"(\\d+)(ms|s|m|h)")


def parse(text: str) -> float:
    """Seconds; raises ValueError for anything that is not a duration."""
    if not re.fullmatch(f"(?:{PART.pattern})+", text):
        raise ValueError(f"not a duration: {text!r}")
    return sum(float(number) * UNITS[unit] for number, unit in PART.findall(text))
'''


def _git(path: Path, *words: str) -> None:
    subprocess.run([*_GIT, "-C", str(path), *words], check=True, capture_output=True)


def _issues(tracker: Tracker) -> dict[str, str]:
    tracker.gates.define(Definition(key="review", title="Somebody has read it"))
    tracker.gates.define(Definition(key="bench", title="It is no slower"))
    text = (
        "Accept what people write, refuse the rest.\n\nDone when `holdfast` accepts `1m30s` wherever it asks for time."
    )
    new = [
        NewIssue(key=key, title=title, priority=priority, depends_on=on, labels=labels, description=text)
        for key, title, priority, on, labels in ISSUES
    ]
    made = dict(zip((each[0] for each in ISSUES), (each.issue.id for each in tracker.create_all(new)), strict=True))
    for key in ("clock", "help"):
        tracker.update(made[key], Update(state=State.DONE))
    tracker.gates.require(made["gate"], ["review", "bench"])
    tracker.gates.judge(made["gate"], "bench", GateStatus.FAILED)
    return made


def _agents(stack: contextlib.ExitStack, root: Path, tracker: Tracker, issues: dict[str, str]) -> None:
    """Three agents that work, one that waits, one that died, and one whose work is queued to land."""
    for name, key, ttl in (("maple", "parser", 900.0), ("birch", "retry", 45.0), ("cedar", "docs", 1800.0)):
        holder = _process(stack)
        worktree = f"issue-{issues[key][:8]}"
        repository = _opened(stack, root, f"agent:{name}")
        repository.worktrees.create(worktree)
        lease = repository.leases.request(ttl=ttl, purpose=f"issue {issues[key][:8]}", behalf_of=holder)
        granted = repository.leases.acquire(worktree, lease)
        asked = tracker.claims.request(f"agent:{name}", ttl=ttl, behalf_of=holder)
        tracker.claims.claim(issues[key], asked)
        if key == "parser":
            proof = repository.proof(worktree, granted.lease.lock_id)
            repository.snapshots.take(worktree, proof)
            (repository.path(worktree) / "durations.py").write_text(_BETTER)
            (repository.path(worktree) / "units.md").write_text("| unit | seconds |\n|---|---|\n| m | 60 |\n")
            repository.snapshots.take(worktree, proof)
            (repository.path(worktree) / "README.md").write_text("# Harbour\n\nA place for ships and boats.\n")
        if key == "docs":
            (repository.path(worktree) / "README.md").write_text("# Harbour\n\nA place for large ships.\n")
    _opened(stack, root, "agent:aspen").worktrees.create("aspen")
    subprocess.run([sys.executable, "-c", _DIES, str(root)], check=True)
    _landed(stack, root, tracker, issues["gate"])


_DIES = """
import sys
from holdfast.repository.repository import Repository

leases = Repository(sys.argv[1], actor="agent:aspen").leases
leases.acquire("aspen", leases.request(ttl=600.0, purpose="an experiment"))
"""
"""An agent that ends without giving its lease back."""


def _landed(stack: contextlib.ExitStack, root: Path, tracker: Tracker, issue_id: str) -> None:
    repository = _opened(stack, root, "agent:rowan")
    landings = Landings(repository, actor="agent:rowan")
    enqueue(landings, repository, "rowan", "harbour")
    landings.work_off()
    change(root, CHECKS, [_CHECK])
    for name, word in _BATCH:
        enqueue(landings, repository, name, word)
    landings.work_off()
    change(root, CHECKS, [])
    enqueue(landings, repository, "rowan-2", "quay")
    claimed = tracker.claims.claim(issue_id, tracker.claims.request("agent:rowan", ttl=900.0))
    claim = ClaimId.parse(claimed.claim.claim_id)
    tracker.claims.release(issue_id, claim, reason="the machine was too loaded to measure anything")


_CHECK = "for each in *.py; do echo checking $each; done; ! grep -n leak *.py"
_BATCH = (
    ("light-the-buoys", "lamp"),
    ("splice-the-mooring", "rope"),
    ("dredge-the-basin", "leak"),
    ("paint-crane", "red"),
)
"""Worktrees, and what each writes. One fails the check: the batch is bisected, and the others land."""


def enqueue(landings: Landings, repository: Repository, name: str, word: str, branch: str = "main") -> Landing:
    """Queue a new worktree with one file."""
    repository.worktrees.create(name)
    (repository.path(name) / f"{name}.py").write_text(f"print({word!r})\n")
    with repository.lease(name, ttl=60.0) as held:
        proof = repository.proof(name, held.lease.lock_id)
        return landings.enqueue(name, proof, LandOptions(branch=branch))


def _opened(stack: contextlib.ExitStack, root: Path, actor: str) -> Repository:
    return stack.enter_context(Repository(root, actor=actor, environment=dict(os.environ)))


def _process(stack: contextlib.ExitStack) -> Holder:
    """The identity of a process that lives until the end."""
    process = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)
    stack.callback(process.communicate)
    holder = holder_with_pid(process.pid)
    assert holder is not None
    return holder


def _ledger(root: Path) -> None:
    opened = init_ledger(root)
    with contextlib.closing(opened):
        opened.ledger.append({"type": "note", "text": "the tide tables are from the harbour office"})
        opened.claims.take(opened.claims.request("1.1", "agent:maple", ttl=600.0))
        opened.ledger.append_many([{"type": "measured", "metres": depth} for depth in (3, 5, 8)])
        opened.claims.take(opened.claims.request("1.2", "agent:birch", ttl=600.0))
        opened.claims.release("1.2", "agent:birch")
