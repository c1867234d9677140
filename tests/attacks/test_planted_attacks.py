"""Hostile bytes below the root of a repository harm nobody outside of it."""

from __future__ import annotations

import pytest

from proof.hostile.runner import Runner
from proof.hostile.victim import Victim, recorded, verdict
from tests.attacks import file_attacks, record_attacks, tree_attacks, trust_attacks
from tests.attacks.planting import Attack, aimed

ATTACKS = [*record_attacks.ATTACKS, *tree_attacks.ATTACKS, *file_attacks.ATTACKS, *trust_attacks.ATTACKS]

MOST_SHOWN = 12


def test_there_are_at_least_a_hundred_attacks_and_each_has_a_name_of_its_own() -> None:
    assert len(ATTACKS) >= 100
    assert len({each.name for each in ATTACKS}) == len(ATTACKS)


def attacked(attack: Attack, victim: Victim, runner: Runner) -> None:
    """Plant an attack and run the commands that it is aimed at: they harm nobody and end in a known way."""
    commands = aimed(victim, attack.aims)
    attack.plant(victim)
    before = recorded(victim)
    outcomes = [runner.run(victim.job(*each)) for each in commands]

    found = verdict(victim, before, zip(commands, outcomes, strict=True))
    assert not found, "\n".join([f"{len(found)} problems", *found[:MOST_SHOWN]])
    if attack.refused:
        assert all(outcome.status != 0 for outcome in outcomes), outcomes


@pytest.mark.sampled(8)
@pytest.mark.parametrize("attack", ATTACKS, ids=lambda each: each.name)
def test_the_attack_changes_nothing_outside_and_ends_in_a_known_way(
    attack: Attack, victim: Victim, runner: Runner
) -> None:
    attacked(attack, victim, runner)
