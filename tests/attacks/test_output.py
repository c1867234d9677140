"""Output that cannot be written, names that a shell would run, and texts that would move the cursor."""

from __future__ import annotations

import json
import re

import pytest

from proof.hostile.commands import command_lines, facts_of, leaves
from proof.hostile.runner import Outcome, Runner
from proof.hostile.victim import Victim, recorded, verdict, write
from tests.attacks.planting import change_record

FULL = "/dev/full"
EVIL = "\x1b[2J\x1b]0;owned\x07\r\n\u202eevil\u2028\x9b31m"


def judge(outcome: Outcome) -> None:
    """A command whose output is lost says so: with a status, and on standard error."""
    assert not outcome.problem, outcome
    if outcome.status == 0:
        assert "standard output" not in outcome.err, outcome
    else:
        assert "No space left on device" in outcome.err or outcome.code, outcome


@pytest.mark.sampled(2)
@pytest.mark.parametrize("path", ["", *sorted(leaves())])
def test_help_that_cannot_be_written_is_reported_by(path: str, victim: Victim, runner: Runner) -> None:
    outcome = runner.run(victim.job(*path.split(), "--help", stdout=FULL))

    assert not outcome.problem, outcome
    assert outcome.status != 0, outcome
    assert "cannot write to standard output" in outcome.err, outcome


LINES = [str(number) for number in range(131)]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("number", LINES)
def test_output_that_cannot_be_written_is_reported_by_every_command(
    number: str, victim: Victim, runner: Runner
) -> None:
    lines = command_lines(facts_of(victim))
    line = lines[int(number) % len(lines)]
    printed = runner.run(victim.job(*line.arguments, stdin=line.stdin))
    outcome = runner.run(victim.job(*line.arguments, stdin=line.stdin, stdout=FULL))

    assert not outcome.problem, outcome
    if line.arguments[0] == "hook":  # its status is an answer: whether the agent may write
        return
    judge(outcome)
    if printed.out and printed.status == 0:
        again = runner.run(victim.job(*line.arguments, stdin=line.stdin))
        assert outcome.status != 0 or not again.out, (str(line), outcome)


@pytest.mark.parametrize("options", [(), ("--json",), ("--field", "lock_id"), ("--export",)], ids=" ".join)
def test_a_lease_whose_id_cannot_be_written_is_given_back(
    options: tuple[str, ...], victim: Victim, runner: Runner
) -> None:
    outcome = runner.run(victim.job("lease", "acquire", "--ttl", "1h", *options, stdout=FULL))

    assert outcome.status != 0, outcome
    assert not (victim.root / ".jvs/locks/main.json").exists()


def test_a_claim_whose_id_cannot_be_written_is_given_back(victim: Victim, runner: Runner) -> None:
    outcome = runner.run(victim.job("issue", "claim-next", "--ttl", "1h", stdout=FULL))
    again = runner.run(victim.job("issue", "claim-next", "--ttl", "1h"))

    assert outcome.status != 0, outcome
    assert again.status == 0, again


def test_a_claim_of_a_named_issue_or_node_whose_id_cannot_be_written_is_given_back(
    victim: Victim, runner: Runner
) -> None:
    made = runner.run(victim.job("issue", "create", "another", "--field", "id")).out.strip()
    for line in (("issue", "claim", made), ("ledger", "claim", "1.3", "--actor", "agent:me")):
        outcome = runner.run(victim.job(*line, stdout=FULL))
        again = runner.run(victim.job(*line))
        assert outcome.status != 0, outcome
        assert "cannot write to standard output" in outcome.err, outcome
        assert again.status == 0, again


def test_completions_and_the_version_that_cannot_be_written_are_reported(victim: Victim, runner: Runner) -> None:
    env = {"_HOLDFAST_COMPLETE": "bash_complete", "COMP_WORDS": "holdfast wor", "COMP_CWORD": "1"}
    for job in (victim.job(env=env, stdout=FULL), victim.job("--version", stdout=FULL)):
        outcome = runner.run(job)
        assert not outcome.problem, outcome
        assert outcome.status != 0, outcome
        assert "cannot write to standard output" in outcome.err, outcome


def test_a_server_whose_answers_cannot_be_written_ends_with_one_failure(victim: Victim, runner: Runner) -> None:
    params = {"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": {"name": "x", "version": "1"}}
    said = json.dumps({"jsonrpc": "2.0", "id": 0, "method": "initialize", "params": params}) + "\n"
    outcome = runner.run(victim.job("mcp", stdin=said, stdout=FULL))

    assert not outcome.problem, outcome
    assert outcome.status != 0, outcome
    assert outcome.code == "E_IO", outcome


@pytest.mark.parametrize("program", ["claude", "cursor"])
def test_a_refusal_counts_even_if_it_cannot_be_written(program: str, victim: Victim, runner: Runner) -> None:
    request = json.dumps({"tool_input": {"file_path": "worktrees/side/mine"}})
    outcome = runner.run(victim.job("hook", "before-write", "--from", f"{program}@1", stdin=request, stdout=FULL))

    assert outcome.status == 2, outcome


# --- Names and texts --------------------------------------------------------------------------------

UNSAFE = ("$(touch pwned)", "`touch pwned`", "a;touch pwned", "a\nb", "a b", "-rf", "'", '"', "a|b", "~root", "\x1b[2J")
COMPLETED = (
    "worktree remove ",
    "worktree show ",
    "lease acquire --worktree ",
    "ref delete ",
    "issue show ",
    "gate check x ",
)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("words", COMPLETED)
def test_completion_offers_only_names_that_no_shell_would_run(words: str, victim: Victim, runner: Runner) -> None:
    for name in UNSAFE:
        (victim.root / "worktrees" / name).mkdir()
        write(victim.root / ".jvs/refs" / f"{name}.json", "{}")
        write(victim.root / ".jit/issues" / f"{name}.json", "{}")
    gates = victim.root / ".jit/gates.json"
    change_record(gates, gates={name: {"title": EVIL} for name in UNSAFE})
    before = recorded(victim)
    line = f"holdfast {words}"
    env = {"_HOLDFAST_COMPLETE": "bash_complete", "COMP_WORDS": line, "COMP_CWORD": str(len(line.split()))}
    outcome = runner.run(victim.job(env=env))

    assert not verdict(victim, before, [((words,), outcome)])
    offered = [each.partition(",")[2] for each in outcome.out.splitlines() if each]
    assert [each for each in offered if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9._-]*", each)] == []


READERS = (
    *(
        "info",
        "who",
        "history --all",
        "show head",
        "worktree list",
        "worktree show spare",
        "lease list",
        "lease status",
    ),
    *("issue list", "issue search evil", "ready", "graph --all", "events", "issue locks", "gate list", "ref list"),
    *(
        "pin list",
        "audit",
        "doctor",
        "ledger log",
        "ledger claims",
        "ledger status",
        "status --worktree side",
        "gc plan",
    ),
)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("words", READERS)
def test_no_text_of_a_repository_moves_the_cursor_in(words: str, victim: Victim, runner: Runner) -> None:
    for path in victim.root.glob(".jvs/descriptors/*.json"):
        change_record(path, note=EVIL, holder_id=EVIL)
    for path in victim.root.glob(".jit/issues/*.json"):
        change_record(path, title=EVIL, description=EVIL, labels=[EVIL], assignee=f"a:{EVIL}")
    change_record(victim.root / ".jvs/locks/side.json", purpose=EVIL, actor=EVIL, holder_id=EVIL)
    change_record(victim.root / ".jvs/worktrees/spare/config.json", label=EVIL)
    change_record(victim.root / ".jvs/refs/v1.json", note=EVIL)
    for path in victim.root.glob(".jvs/pins/*.json"):
        change_record(path, reason=EVIL)
    outcome = runner.run(victim.job(*words.split()))

    assert not outcome.problem, outcome
    shown = outcome.out + outcome.err
    assert [each for each in shown if not (each.isprintable() or each in "\n\t")] == []
