"""Gates: defined once, required by issues, decided by people or checkers."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import IO, Any, NamedTuple

import msgspec

from holdfast.clock import LONGEST_COMMAND, format_duration, format_instant
from holdfast.errors import AlreadyExists, Failure, NotFound, SettingInvalid, TransitionRefused
from holdfast.fs import calls
from holdfast.fs.directory import Directory
from holdfast.fs.names import LONGEST_DESCRIPTION, checked_text, printable, safe_name
from holdfast.issues import model, rules
from holdfast.issues.model import GATE_RUNS, GATES, Checker, Gate, GateRun, GateStatus, Issue, Registry
from holdfast.issues.transactions import Draft, Transactions, check_dependents
from holdfast.locks.process_tree import ProcessTree
from holdfast.store.model import Key

AUTO, MANUAL = "auto", "manual"


class Definition(NamedTuple):
    """A gate to define; with a command it is automatic."""

    key: str
    title: str = ""
    description: str = ""
    stage: str = "postcheck"
    command: str | None = None
    timeout: float = 300.0
    working_dir: str | None = None
    env: Mapping[str, str] = {}

    def as_record(self) -> dict[str, Any]:
        checker = self.command and {
            "type": "exec",
            "command": self.command,
            "timeout_seconds": int(self.timeout) if self.timeout == int(self.timeout) else self.timeout,
            "working_dir": self.working_dir,
            "env": dict(self.env),
        }
        return {
            "version": 1,
            "key": self.key,
            "title": self.title or self.key,
            "description": self.description,
            "stage": self.stage,
            "mode": AUTO if checker else MANUAL,
            "checker": checker or None,
            "priority": 100,
            "reserved": {},
            "auto": bool(checker),
            "example_integration": None,
        }


class Gating:
    """The gates of one tracker."""

    def __init__(
        self, transactions: Transactions, root: Path | None = None, checked: Callable[[], Path] | None = None
    ) -> None:
        self._transactions = transactions
        self._directory = root or Path()
        self._checked = checked

    def all(self) -> dict[str, Gate]:
        """All gates, by key."""
        document = self._transactions.store.read(GATES)
        gates = document.record.gates if document else {}
        return {key: model.gate_of(key, record) for key, record in gates.items()}

    def define(self, definition: Definition, *, replace: bool = False) -> Gate:
        """Define a gate; raises `AlreadyExists` unless `replace` is set. Its checker counts as approved."""
        key = safe_name(definition.key, what="gate")
        checked_text(definition.title, what="title")
        for what in ("description", "command", "working_dir"):
            checked_text(getattr(definition, what) or "", what=what, limit=LONGEST_DESCRIPTION)
        model.checked_context(definition.env)
        if definition.stage not in ("precheck", "postcheck"):
            raise SettingInvalid("stage", definition.stage, "precheck or postcheck")
        if not 0 < definition.timeout <= LONGEST_COMMAND:
            expected = f"a duration above 0s and of {format_duration(LONGEST_COMMAND)} at most"
            raise SettingInvalid("timeout", format_duration(definition.timeout), expected)

        def refuse_existing(known: Iterable[str]) -> None:
            if key in known and not replace:
                raise AlreadyExists(f"gate {key} already exists", gate=key, hint="Use --replace to change it.")

        def body(draft: Draft) -> Gate:
            registry = draft.get(GATES) or Registry()
            refuse_existing(registry.gates)
            record = {**registry.gates.get(key, {}), **definition.as_record()}
            draft.set(GATES, msgspec.structs.replace(registry, gates={**registry.gates, key: record}))
            draft.record("gate_defined", "", gate_key=key)
            return model.gate_of(key, record)

        self._transactions.check_initialised()
        refuse_existing(self.all())
        checker = model.gate_of(key, definition.as_record()).checker
        if checker is not None:
            self.approve([checker])  # first: if that fails, nothing is defined that its author cannot run
        return self._transactions.change(body, also=[GATES])

    def are_approved(self, checkers: Iterable[Checker]) -> list[bool]:
        """Whether the user has approved each of these checkers on this machine."""
        from holdfast.store.approvals import are_approved  # loaded late: few commands need it

        return are_approved(self._directory, [each.as_text() for each in checkers])

    def require_approved(self, gate: str, checker: Checker) -> None:
        """Raise `NotApproved` unless the user has approved the checker of a gate on this machine."""
        from holdfast.store.approvals import require_command

        shown = f"gate {gate}, {printable(checker.command)!r},"
        require_command(self._directory, checker.as_text(), shown, gate=gate, command=checker.command)

    def approve(self, checkers: Iterable[Checker]) -> None:
        """Approve these checkers, exactly as they are, for this user on this machine."""
        from holdfast.store.approvals import approve

        approve(self._directory, commands=[each.as_text() for each in checkers])

    def require(self, issue_id: str, gates: Iterable[str]) -> Issue:
        """Require gates of an issue: it is done only once they pass."""
        wanted = list(dict.fromkeys(gates))
        self._transactions.need(issue_id)

        def body(draft: Draft) -> Issue:
            check_defined(draft, wanted)
            before = draft.issue(issue_id)
            issue = draft.put(rules.with_gates(before, wanted))
            for gate in issue.gates_required:
                if gate not in before.gates_required:
                    draft.record("gate_added", issue_id, gate_key=gate)
            return issue

        return self._transactions.change(body, issues=[issue_id], also=[GATES])

    def judge(self, issue_id: str, gate: str, status: GateStatus, *, force: bool = False) -> Issue:
        """Pass or fail a manual gate. An automatic one is decided by its checker."""
        defined = self.all().get(gate)
        if defined is not None and defined.checker is not None and defined.mode == AUTO and not force:
            raise TransitionRefused(
                f"gate {gate} is automatic: its checker decides it",
                gate=gate,
                hint=f"Run 'holdfast gate check {issue_id[:8]} {gate}', or use --force to decide by hand.",
            )
        return self._judge(issue_id, gate, status, self._transactions.actor, None)

    def check(self, issue_id: str, gate: str, environment: Mapping[str, str]) -> tuple[Issue, GateRun]:
        """Run the checker of a gate and record the result. No lock is held while it runs. `NotApproved` if the user
        has not approved the checker: it may come from a stranger."""
        issue = self._transactions.need(issue_id)
        defined = self.all().get(gate)
        if defined is None or gate not in issue.gates_required:
            raise NotFound(f"{issue_id} does not require gate {gate}", issue_id=issue_id, gate=gate)
        if defined.checker is None:
            raise TransitionRefused(
                f"gate {gate} has no checker",
                gate=gate,
                hint=f"Decide it by hand: 'holdfast gate pass {issue_id[:8]} {gate}', or 'gate fail'.",
            )
        rules.check_changeable(issue, "its gates can no longer change")
        self.require_approved(gate, defined.checker)
        began = self._transactions.store.now()
        names = {"HOLDFAST_ISSUE_ID": issue_id, "HOLDFAST_GATE": gate}
        place = self._directory if self._checked is None else self._checked()
        outcome = run_checker(defined.checker, place, {**environment, **names})
        run = GateRun(
            run_id=str(uuid.uuid4()),
            gate_key=gate,
            stage=defined.stage,
            issue_id=issue_id,
            status=(GateStatus.PASSED if outcome.passed else GateStatus.FAILED).value,
            started_at=format_instant(began),
            completed_at=format_instant(began + outcome.seconds),
            duration_ms=round(outcome.seconds * 1000),
            exit_code=outcome.exit_code,
            stdout=outcome.stdout,
            stderr=outcome.stderr,
            command=defined.checker.command,
            by="auto:checker",
            message=outcome.message,
        )
        return self._judge(issue_id, gate, GateStatus(run.status), run.by, run), run

    def runs(self, issue_id: str) -> list[GateRun]:
        """The checker runs of an issue, oldest first."""
        runs = (document.record for _, document in self._transactions.store.scan(GATE_RUNS))
        return sorted((run for run in runs if run.issue_id == issue_id), key=lambda run: run.started_at)

    def _judge(self, issue_id: str, gate: str, status: GateStatus, by: str, run: GateRun | None) -> Issue:
        return self._transactions.retrying(lambda: self._try_to_judge(issue_id, gate, status, by, run))

    def _try_to_judge(self, issue_id: str, gate: str, status: GateStatus, by: str, run: GateRun | None) -> Issue:
        around = self._transactions.surroundings(issue_id)

        def body(draft: Draft) -> Issue:
            check_dependents(draft, around)
            issue = rules.judged(draft.issue(issue_id), gate, status, by, draft.at, draft.lookup)
            if run is not None:
                draft.set(GATE_RUNS.key(run.run_id), run)
            facts = {"gate_key": gate, "updated_by": by, **({"run_id": run.run_id} if run else {})}
            draft.record(f"gate_{status.value}", issue_id, **facts)
            issue = draft.put(issue)
            draft.end_claim_unless_working(issue)
            draft.settle(around.followers)
            return issue

        keys: list[Key[Any]] = [model.CLAIMS.key(issue_id), model.DEPENDENTS.key(issue_id)]
        keys += [GATE_RUNS.key(run.run_id)] if run else []
        issue = self._transactions.change(body, issues=around.named, seen=around.seen, also=keys)
        self._transactions.settle_others(around, issue)
        return issue


def check_defined(draft: Draft, gates: Iterable[str]) -> None:
    """Raise `NotFound` for undefined gates. The transaction names the registry."""
    for gate in gates:
        registry = draft.get(GATES) or Registry()
        if gate not in registry.gates:
            hint = f"Define it first: 'holdfast gate define {gate}'."
            raise NotFound(f"gate {gate} does not exist", gate=gate, hint=hint)


MOST_OUTPUT = 256 << 10  # how many bytes of each output stream are kept, from its end
_CANCEL_WITHIN = 0.1  # seconds
_LAST_WORDS = 2.0  # how long to wait for the output of a process that left the process group


class CheckerResult(NamedTuple):
    """How a checker ended. `exit_code` is None if it was killed or never started."""

    passed: bool
    exit_code: int | None
    message: str | None
    stdout: str
    stderr: str
    seconds: float


class Watched(NamedTuple):
    """How others take part in a checker: `log` gets all of its output, standard error included, in blocks as they
    arrive, and setting `cancelled` ends it."""

    log: Callable[[bytes], None]
    cancelled: threading.Event


def run_checker(
    checker: Checker, root: Path, environment: Mapping[str, str], watched: Watched | None = None
) -> CheckerResult:
    """Run a checker to its end or its time limit. Its descendants end with it."""
    directory = root
    if checker.working_dir:
        try:
            with Directory.open(root) as top, top.beneath(checker.working_dir.removeprefix("./").rstrip("/")) as below:
                directory = below.path
        except Failure as failure:
            return CheckerResult(False, None, f"not started: {failure.message}", "", "", 0.0)
    began = time.monotonic()
    try:
        process = subprocess.Popen(
            ["/bin/sh", "-c", checker.command] if sys.platform != "win32" else checker.command,
            shell=sys.platform == "win32",
            cwd=directory,
            env={**environment, **checker.env},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT if watched else subprocess.PIPE,
            start_new_session=sys.platform != "win32",
        )
    except (OSError, ValueError) as error:
        return CheckerResult(False, None, f"not started: {getattr(error, 'strerror', error)}", "", "", 0.0)
    log = watched.log if watched else None
    outputs = [_Output(each, log) for each in (process.stdout, process.stderr) if each is not None]
    message = "the caller failed"
    try:
        message = _wait(process, checker.timeout, watched.cancelled if watched else None)
    finally:
        if message:
            ProcessTree(process).kill()
        _kill_group(process)
    seconds = time.monotonic() - began
    stdout, stderr = [*(each.text() for each in outputs), ""][:2]
    code = process.returncode
    if not message and code < 0:
        message = f"ended by signal {-code}"
    own = code if not message else None
    return CheckerResult(own == 0, own, message or None, stdout, stderr, seconds)


def _wait(process: subprocess.Popen[bytes], timeout: float, cancelled: threading.Event | None) -> str:
    """Wait for the end of a process; return the reason why it is to be killed, or nothing if it has ended."""
    deadline = time.monotonic() + timeout
    while (left := deadline - time.monotonic()) > 0:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(left if cancelled is None else min(left, _CANCEL_WITHIN))
            return ""
        if cancelled is not None and cancelled.is_set():
            return "cancelled"
    return f"killed after {format_duration(timeout)}"


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    if sys.platform == "win32":
        process.kill()
    else:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)  # the group lives as long as one of its processes
    process.wait()


class _Output:
    """Reads one output stream in the background and keeps its end."""

    def __init__(self, stream: IO[bytes], log: Callable[[bytes], None] | None) -> None:
        self._stream, self._kept, self._dropped, self._log = stream, b"", 0, log
        self._failure: Failure | None = None
        self._reader = threading.Thread(target=self._read, name="holdfast-checker", daemon=True)
        self._reader.start()

    def _read(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            while block := calls.read(self._stream.fileno(), 1 << 16):
                kept = self._kept + block
                self._dropped += max(0, len(kept) - MOST_OUTPUT)
                self._kept = kept[-MOST_OUTPUT:]
                self._write(block)

    def _write(self, block: bytes) -> None:
        if self._log is not None and self._failure is None:
            try:
                self._log(block)
            except Failure as failure:  # the command must not wait for a reader
                self._failure = failure

    def text(self) -> str:
        """The end of the output; raises the failure of the log, if it had one."""
        self._reader.join(_LAST_WORDS)
        if not self._reader.is_alive():
            self._stream.close()
        if self._failure is not None:
            raise self._failure
        text = self._kept.decode("utf-8", "backslashreplace")
        return f"[{self._dropped} bytes left out]\n{text}" if self._dropped else text
