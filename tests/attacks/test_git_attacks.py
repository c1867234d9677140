"""A hostile repository in a git home harms nobody: records, `.git` itself, and what leads to it."""

from __future__ import annotations

import pytest

from proof.hostile.runner import Runner
from proof.hostile.victim import Victim
from tests.attacks import file_attacks, git_attacks, record_attacks
from tests.attacks.planting import Attack
from tests.attacks.test_planted_attacks import attacked

AS_IN_A_PLAIN_HOME = [*record_attacks.operations(), *record_attacks.SINGLE, *file_attacks.linked_directories()]
"""Those whose answer depends on the home. The others are about records, which are the same in both."""


def test_there_are_at_least_twenty_attacks_on_git_and_each_has_a_name_of_its_own() -> None:
    assert len(git_attacks.ATTACKS) >= 20
    assert len({each.name for each in git_attacks.ATTACKS}) == len(git_attacks.ATTACKS)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("attack", git_attacks.ATTACKS, ids=lambda each: each.name)
def test_an_attack_on_git_changes_nothing_outside_and_ends_in_a_known_way(
    attack: Attack, git_victim: Victim, runner: Runner
) -> None:
    attacked(attack, git_victim, runner)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("attack", AS_IN_A_PLAIN_HOME, ids=lambda each: each.name)
def test_an_attack_on_records_in_a_git_home_harms_nobody(attack: Attack, git_victim: Victim, runner: Runner) -> None:
    attacked(attack, git_victim, runner)
