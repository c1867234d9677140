"""Hostile text in every record, and what could run in a page."""

from __future__ import annotations

import contextlib
import re
import subprocess
from html.parser import HTMLParser
from pathlib import Path

from holdfast.issues.creating import NewIssue
from holdfast.issues.gates import Definition
from holdfast.repository.git_init import adopt_checkout
from holdfast.repository.landing import Landings, LandOptions
from holdfast.repository.landing_checks import check_runs
from holdfast.repository.ledgers import init_ledger
from holdfast.repository.opening import open_tracker
from holdfast.repository.repository import Repository
from holdfast.repository.settings import CHECKS, change

HOSTILE = (
    "<script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "'><svg/onload=alert(1)>",
    "</title></textarea></style></script><b>",
    "javascript:alert(1)",
    "%%{init: {'theme': 'x'}}%% graph LR; click A href \"javascript:alert(1)\"",
    "\x1b]0;owned\x07 \u202e \u2066",
    "${7*7} {{7*7}} <%= 7*7 %>",
)


class Markup(HTMLParser):
    """What could run in a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.scripts: list[str | None] = []
        self.suspicious: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        if tag == "script":
            self.scripts.append(given.get("src"))
        if tag in ("iframe", "object", "embed", "style", "base", "img"):
            self.suspicious.append(tag)
        for name, value in attrs:
            leads = name in ("href", "src", "action") and not re.match(r"[/#?]", value or "")
            if name.startswith("on") or name == "style" or leads:
                self.suspicious.append(f"{tag} {name}={value}")


_SCRIPT = "<script>alert(2)</script>"
_GIT = ("git", "-c", "user.name=Ada", "-c", "user.email=ada@example.com", "-c", "init.defaultBranch=main")


def hostile_repository(checkout: Path) -> list[str]:
    """Make a repository whose every record has hostile text; return the pages and parts that show it."""
    checkout.mkdir()
    (checkout / "code.py").write_text("first = 1\n")
    for words in (("init", "-q"), ("add", "."), ("commit", "-qm", HOSTILE[0])):
        subprocess.run([*_GIT, "-C", str(checkout), *words], check=True, capture_output=True)
    root = Path(adopt_checkout(checkout).root)
    issue = _issues(root)
    pages = [f"issue/{issue}", f"prompt/{issue}", "overview", "board", "graph", "names", "worktrees", "attention"]
    with Repository(root, actor="agent:<b>") as repository:
        old, new = _snapshots(repository)
        pages += ["worktree/tree", "changes/tree", "changed/tree", f"diff?worktree=tree&old={old}&new={new}"]
        pages += ["diff?worktree=tree", *_landed(repository)]
        text = " ".join(HOSTILE)
        repository.leases.acquire("tree", repository.leases.request(ttl=600.0, purpose=text))
        with contextlib.closing(init_ledger(root)) as opened:
            opened.ledger.append({"type": HOSTILE[0], "text": text, HOSTILE[1]: {HOSTILE[2]: HOSTILE[3]}})
            opened.claims.take(opened.claims.request("1.1", "agent:<b>", ttl=600.0))
    rest = ("conflicts", "timeline", "timeline?at=9999999999", "ledger", "ledger-check", "audit", "findings")
    return [*pages, *rest]


def _issues(root: Path) -> str:
    """Issues whose every field is hostile, and a gate whose command says so; returns the issue with the gate."""
    tracker = open_tracker(root, actor="human:ada")
    tracker.initialise()
    command = f"echo '{_SCRIPT}'; echo '{HOSTILE[1]}' >&2; false"
    tracker.gates.define(Definition(key="tests", title=HOSTILE[0], description=HOSTILE[1], command=command))
    tracker.gates.approve([gate.checker for gate in tracker.gates.all().values() if gate.checker])
    made: list[str] = []
    for number, text in enumerate(HOSTILE):
        fine = text.replace("\x1b", "").replace("\x07", "")
        new = NewIssue(
            title=f"{number} {fine}",
            description=fine,
            labels=(fine.replace(" ", "_"),),
            context={fine: fine},
            assignee=f"agent:{number}<b>",
            depends_on=tuple(made[-1:]),
        )
        made.append(tracker.create(new).id)
    tracker.gates.require(made[0], ["tests"])
    tracker.gates.check(made[0], "tests", {"PATH": "/usr/bin:/bin"})
    tracker.claims.claim(made[0], tracker.claims.request("agent:0<b>", ttl=600.0, purpose=HOSTILE[0]))
    return made[0]


def _snapshots(repository: Repository) -> tuple[str, str]:
    """Two snapshots with hostile notes, names of files, and content."""
    repository.worktrees.create("tree")
    with repository.lease("tree", ttl=600.0) as held:
        (repository.path("tree") / "code.py").write_text("first = 2\n")
        before = repository.snapshot("tree", held, note=HOSTILE[0])
        for number, text in enumerate(HOSTILE):
            name = text.replace("/", "_")
            (repository.path("tree") / f"{number}{name}.py").write_text(f"{text}\n'{text}'  # {text}\n")
        (repository.path("tree") / "code.py").write_text(f"first = {HOSTILE[0]!r}\n")
        after = repository.snapshot("tree", held, note=" ".join(HOSTILE))
        (repository.path("tree") / "code.py").write_text(f"second = {HOSTILE[0]!r}\n")
    return before.snapshot_id, after.snapshot_id


def _landed(repository: Repository) -> list[str]:
    """Entries with hostile files, reasons and logs: one failed its check, and one was cancelled."""
    landings = Landings(repository, actor="agent:<b>")
    change(repository.root, CHECKS, [f"echo '{_SCRIPT}'; echo '{HOSTILE[1]}'; false"])
    for name in ("one", "two"):
        repository.worktrees.create(name)
        (repository.path(name) / f"{HOSTILE[0].replace('/', '_')}{name}").write_text(_SCRIPT)
        with repository.lease(name, ttl=60.0) as held:
            proof = repository.proof(name, held.lease.lock_id)
            entry = landings.enqueue(name, proof, LandOptions(branch="main"))
        if name == "one":
            landings.work_off()
    landings.cancel(entry.landing_id, " ".join(HOSTILE))
    runs = [each.run_id for each in check_runs(repository.context.paths)]
    entries = [each.landing_id for each in landings.all()]
    return [
        "landing",
        "batches",
        *(f"{part}/{each}" for each in entries for part in ("landing", "log")),
        *(f"{part}/{each}" for each in runs for part in ("run", "run-log")),
    ]
