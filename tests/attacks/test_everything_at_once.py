"""A repository that holds every attack at once can be examined, repaired, exported and deleted without harm."""

from __future__ import annotations

import random
from collections.abc import Iterable
from subprocess import SubprocessError

import pytest

from holdfast.errors import Failure
from proof.effort import SEED, rounds
from proof.hostile.runner import Runner
from proof.hostile.victim import Victim, changes, leaks, recorded, remove_everything
from tests.attacks import file_attacks, git_attacks, record_attacks, tree_attacks
from tests.attacks.planting import Attack, aimed

COMMANDS = (
    *(
        "doctor",
        "doctor --strict",
        "doctor --fix",
        "doctor --fix",
        "issue validate --fix",
        "ledger verify",
        "audit --verify",
    ),
    *(
        "verify --all",
        "export head {out}/exported",
        "export v1 {out}/older",
        "issue export",
        "gc plan",
        "gc run --plan {plan}",
    ),
    *("worktree remove spare --force", "worktree remove open --force --no-snapshot", "who", "info", "history --all"),
)
LEAST = 60
AT_ONCE = (
    "main ",
    ".jvs is ",
    ".jvs/format.json ",
    "a format ",
    "the checkout",
    "git's common directory",
    ".git/HEAD ",
)
"""Attacks that would end everything at once."""
PLAIN = (*record_attacks.ATTACKS, *tree_attacks.ATTACKS, *file_attacks.ATTACKS)


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("order", range(rounds(20, least=1)))
def test_all_attacks_at_once_harm_nobody(order: int, victim: Victim, runner: Runner) -> None:
    attacked_at_once(order, PLAIN, COMMANDS, victim, runner)


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("share", [1.0, 0.3, 0.1])
@pytest.mark.parametrize("order", range(rounds(20, least=1)))
def test_all_attacks_on_git_at_once_harm_nobody(order: int, share: float, git_victim: Victim, runner: Runner) -> None:
    """Where there are few, more commands get far."""
    chance = random.Random(f"{SEED} {order} {share}")
    some = [each for each in (*git_attacks.ATTACKS, *PLAIN) if chance.random() < share]
    lines = (*COMMANDS, "snapshot -m x", "land open --wait 0", "deinit --force")
    attacked_at_once(order, some, lines, git_victim, runner, least=round(LEAST * share / 2))


def attacked_at_once(
    order: int, some: Iterable[Attack], commands: tuple[str, ...], victim: Victim, runner: Runner, least: int = LEAST
) -> None:
    """In a random order: where two attacks need the same place, the later one gets it, or none."""
    lines, attacks = aimed(victim, commands), list(some)
    random.Random(f"{SEED} {order}").shuffle(attacks)
    planted = 0
    for attack in attacks:
        if attack.name.startswith(AT_ONCE):
            continue
        try:
            attack.plant(victim)
            planted += 1
        except (Failure, OSError, ValueError, StopIteration, KeyError, TypeError, AttributeError, SubprocessError):
            continue  # another attack has taken its place
    assert recorded(victim).keys() >= {"home/docs/letter"}
    assert planted >= least
    before = recorded(victim)
    outcomes = [runner.run(victim.job(*each)) for each in lines]
    remove_everything(victim.repository)
    victim.repository.mkdir()

    problems = [f"{' '.join(line)}: {each.problem}" for line, each in zip(lines, outcomes, strict=True) if each.problem]
    assert not problems, "\n".join(problems)
    assert not changes(before, recorded(victim))
    assert not leaks(victim)
