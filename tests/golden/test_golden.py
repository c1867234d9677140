"""Golden tests of the stable interfaces: JSON output, files on disk, error codes.

One fixed scenario runs in a new directory. Ids, times, processes, paths and prose become placeholders;
everything else must match the golden files in this directory.

`HOLDFAST_GOLDEN=write pytest tests/golden` rewrites them after an intended change: review their diff before
you commit it. A difference in `files.txt`, `intents.txt` or `errors.json` breaks repositories and callers.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.errors import Failure
from tests.golden.scenario import INSTANT, Scenario

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs Linux file modes, processes and /proc")

HERE = Path(__file__).parent
WRITE = os.environ.get("HOLDFAST_GOLDEN") == "write"  # read before the scenario clears our variables
CONTENTS = ("hello\n", "#!/bin/sh\n", "bye\n", "new\n", "last\n")
CHAPTERS = """
    repository worktrees leases snapshots retention ledger issues locks overview intents files findings
""".split()
_OURS = ("HOLDFAST_", "AGENCY_", "JIT_", "JVS_", "XDG_", "_HOLDFAST")


# --- The scenario ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def recorded() -> Iterator[dict[str, str]]:
    """The text of each chapter."""
    memory = Path("/dev/shm")
    where = memory if os.access(memory, os.W_OK) else None
    mask = os.umask(0o022)
    with tempfile.TemporaryDirectory(dir=where) as directory, pytest.MonkeyPatch.context() as patch:
        root = Path(directory).resolve()
        root.chmod(0o755)  # so that modes differ from those of a private directory
        for name in [each for each in os.environ if each.startswith(_OURS)]:
            patch.delenv(name)
        patch.setenv("XDG_DATA_HOME", str(root / "data"))
        patch.setenv("HOLDFAST_DATA_DIR", str(root / "data" / "locks"))
        patch.setenv("HOLDFAST_ACTOR", "agent:golden")
        patch.setenv("JVS_SNAPSHOT_ENGINE", "linked")
        patch.chdir(root)
        scenario = Scenario(root, *(hashlib.sha256(each.encode()).hexdigest() for each in CONTENTS))
        try:
            _play(scenario, patch)
        finally:
            os.umask(mask)
        yield {name: "\n".join(lines) + "\n" for name, lines in scenario.chapters.items()}


def _play(holdfast: Scenario, patch: pytest.MonkeyPatch) -> None:
    main = holdfast.root / "repo" / "main"
    holdfast.chapter("repository")
    holdfast("info", "init repo", "init repo")  # the first one fails: no repository yet
    patch.chdir(main)
    _worktrees(holdfast)
    _leases(holdfast, main, patch)
    _snapshots(holdfast, main)
    patch.chdir(main)  # the restore has replaced the directory
    _retention(holdfast, main)
    patch.chdir(main.parent)
    _ledger(holdfast)
    _issues(holdfast)
    _locks(holdfast)
    _overview(holdfast)
    holdfast.chapter("intents")
    holdfast.record_intermediate(
        "worktree rename parser reader",
        "restore v1 --inplace --reason again --worktree reader",
        "issue create Watched",
        "worktree remove reader",
        """ledger append '{"type":"note"}' --repo proof""",
    )
    holdfast.chapter("files")
    holdfast.record_files(main.parent, holdfast.root / "data")
    _findings(holdfast, main.parent)


def _worktrees(holdfast: Scenario) -> None:
    holdfast.chapter("worktrees")
    holdfast("worktree create experiment --label 'to try things'", "worktree create experiment")
    holdfast("worktree create open --shared", "worktree list", "worktree show experiment")
    holdfast("worktree rename experiment parser", "worktree path parser")


def _leases(holdfast: Scenario, main: Path, patch: pytest.MonkeyPatch) -> None:
    (main / "d").mkdir()
    (main / "d" / "link").symlink_to("../a.txt")
    _write(main, {"a.txt": CONTENTS[0], "d/b.sh": CONTENTS[1]})
    holdfast.chapter("leases")
    held = holdfast("lease acquire --ttl 10m --purpose build")
    holdfast("lease acquire")
    patch.setenv("HOLDFAST_LOCK_ID", held["lock_id"])
    holdfast("lease status", "lease list", "lease renew --ttl 20m", "lease steal", "guard a.txt")
    holdfast("snapshot -m first --tag v1", "lease release", "lease release")
    patch.delenv("HOLDFAST_LOCK_ID")
    holdfast("run --snapshot -- true", "lease acquire --worktree open")


def _write(main: Path, contents: dict[str, str]) -> None:
    for name, content in contents.items():
        (main / name).write_text(content)
    (main / "d" / "b.sh").chmod(0o755)
    for path in (main, *main.rglob("*")):
        os.utime(path, (INSTANT, INSTANT), follow_symlinks=False)


def _snapshots(holdfast: Scenario, main: Path) -> None:
    holdfast.chapter("snapshots")
    _write(main, {"a.txt": CONTENTS[2], "new.txt": CONTENTS[3]})
    holdfast("status", "diff --patch", "snapshot -m second", "history", "history --all --limit 1")
    holdfast("show", "show v1 --files", "show nothing", "diff v1 head --stat", "verify", "verify --all")
    holdfast("restore v1 back", "export v1 ../../out", "worktree remove back --dry-run", "worktree remove back")
    holdfast("restore v1 --inplace --reason oops --dry-run", "restore v1 --inplace --reason oops")


def _retention(holdfast: Scenario, main: Path) -> None:
    _write(main, {"last.txt": CONTENTS[4]})
    holdfast.chapter("retention")
    holdfast("snapshot -m third", "ref create keep head -m why", "ref list", "ref create keep head")
    holdfast("ref delete keep")
    pin = holdfast("pin add head~1 --reason because --keep-for 30d")["pin_id"]
    holdfast("pin list", f"pin remove {pin}", "pin add head~1", "gc policy", "gc policy --keep-last 1")
    plan = holdfast("gc plan")["plan"]
    holdfast(f"gc run --plan {plan} --dry-run", f"gc run --plan {plan}", "gc plan --dry-run")


def _ledger(holdfast: Scenario) -> None:
    holdfast.chapter("ledger")

    def at_proof(*lines: str, stdin: str = "") -> None:
        holdfast(*(f"{line} --repo proof" for line in lines), stdin=stdin)

    at_proof("ledger init --claim-files", """ledger append '{"type":"note","body":"one"}'""")
    at_proof("ledger append -", stdin='{"type":"note","id":"mine"}\n{"type":"node","node_id":"1.2"}\n')
    at_proof("""ledger append '{"type":"note"}' --if-sequence 1""", "ledger show mine", "ledger status")
    at_proof("ledger claim 1.2 --actor agent-7 --ttl 5m", "ledger claim 1.2 --actor agent-8")
    at_proof("ledger claim 1.3 --actor agent-7 --purpose work", "ledger extend 1.2 --actor agent-7 --ttl 10m")
    with holdfast.waiter("ledger claim 1.2 --actor b --wait 1m --repo proof", shown_by="ledger claims --repo proof"):
        at_proof("ledger claims")
    at_proof("ledger claim-history 1.2", "ledger release 1.3 --actor agent-7")
    at_proof("ledger release 1.3 --actor agent-7", "ledger reap")
    at_proof("ledger log --limit 3", "ledger unlock", "ledger verify", "ledger status")


def _issues(holdfast: Scenario) -> None:
    holdfast.chapter("issues")
    holdfast("issue init")
    parser = holdfast("issue create Parser --priority high --label area:parser --description reads")["id"]
    holdfast("gate define review --title Read", "gate define tests --checker true --timeout 1m")
    user = holdfast(f"issue create Use --depends-on {parser} --gate review")["id"]
    holdfast("issue create --batch", stdin='[{"title":"A","key":"a"},{"title":"B","depends_on":["a"]}]')
    holdfast("issue list --state ready", f"issue show {user}", "issue search parser", "issue show none")
    holdfast(f"issue update {parser} --context branch=x --label urgent --increment attempts")
    claim = holdfast(f"issue claim {parser} --purpose work")["claim_id"]
    holdfast(f"issue claim {parser}", f"issue heartbeat {parser} --claim {claim}")
    holdfast(f"issue finish --claim {claim}", f"issue update {parser} --title Late --claim {claim}")
    taken = holdfast("issue claim-next")
    holdfast(f"issue release {taken['id']} --claim {taken['claim_id']} --reason stuck")
    holdfast("gate list", f"gate require {user} tests", f"gate check {user} tests")
    holdfast(f"gate fail {user} review", f"gate pass {user} review", f"dep tree {user}")
    other = holdfast("issue create Other")["id"]
    holdfast(f"dep add {other} {user}", f"dep add {user} {other}", f"dep remove {other} {user}")
    holdfast(f"issue breakdown {other} --part One --part Two")
    holdfast("ready", "blocked", "graph", "issue validate", "issue locks", f"issue delete {other}")
    holdfast("issue claim-next --label none", "agent run --next -- true", "issue claim-next")
    holdfast("events --limit 3", "issue export", "issue list")


def _locks(holdfast: Scenario) -> None:
    holdfast.chapter("locks")
    lock = holdfast.root / "data" / "locks" / "repos" / "mine" / ".lock"
    holdfast("repo-lock status mine", f"repo-lock run mine -- cp {lock} {holdfast.root}/data/seen.lock")
    holdfast("repo-lock status", "lock status x.lock", "lock run x.lock -- true")
    holdfast("lock status x.lock", "lock status")


def _overview(holdfast: Scenario) -> None:
    holdfast.chapter("overview")
    holdfast("lease acquire --ttl 10m --purpose hold")
    with holdfast.waiter("lease acquire --wait 1m --purpose later", shown_by="lease status"):
        holdfast("lease status", "who")
        holdfast.record_files(holdfast.root / "repo" / ".jvs" / "queues")
    holdfast("info", "doctor", "doctor --strict", "audit --limit 3", "audit --verify --limit 1")


def _findings(holdfast: Scenario, repo: Path) -> None:
    """Damage one file of each kind and record the findings."""
    holdfast.chapter("findings")
    (repo / ".jit" / "issues" / "11111111-1111-4111-8111-111111111111.json").write_text("{}")
    holdfast("issue validate", "doctor")
    events = sorted((repo / "proof" / "ledger").glob("event-*.json"))
    events[-2].unlink()
    events[0].write_text('{"type":')
    holdfast("ledger verify --repo proof")
    (snapshot,) = (repo / ".jvs" / "snapshots").glob("*/payload/last.txt")
    snapshot.write_text("other\n")
    holdfast("verify --all", "doctor --strict")
    trail = repo / ".jvs" / "audit" / "audit.jsonl"
    trail.write_text(trail.read_text().replace("experiment", "other", 1))
    holdfast("audit --verify")


# --- The tests -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chapter", CHAPTERS)
def test_a_chapter_equals_its_golden_file(chapter: str, recorded: dict[str, str]) -> None:
    _compare(f"{chapter}.txt", recorded[chapter])


def test_every_golden_file_belongs_to_a_chapter(recorded: dict[str, str]) -> None:
    assert sorted(recorded) == sorted(CHAPTERS)
    assert {path.stem for path in HERE.glob("*.txt")} == set(CHAPTERS)


def test_every_error_code_keeps_its_exit_status_and_its_retryability() -> None:
    codes: dict[str, list[list[object]]] = {}
    classes = [Failure]
    for each in classes:  # the list grows during the loop
        classes += [child for child in each.__subclasses__() if child.__module__.startswith("holdfast.")]
        facts: list[object] = [int(each.exit_status), each.retryable]
        if facts not in codes.setdefault(each.code, []):
            codes[each.code].append(facts)
    assert all(len(facts) == 1 for facts in codes.values()), codes
    lines = [f"{json.dumps(code)}: {json.dumps(facts[0])}" for code, facts in sorted(codes.items())]
    _compare("errors.json", "{\n" + ",\n".join(lines) + "\n}\n")


def _compare(name: str, found: str) -> None:
    golden = HERE / name
    if WRITE:
        golden.write_text(found)
    before = golden.read_text() if golden.exists() else ""
    lines = difflib.unified_diff(before.splitlines(), found.splitlines(), f"golden/{name}", "found", lineterm="")
    difference = "\n".join(lines)
    if difference:
        pytest.fail(difference, pytrace=False)
