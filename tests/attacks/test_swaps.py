"""A directory that is exchanged with a link while a command works in it leads nobody astray."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from proof import effort
from proof.effort import rounds
from proof.hostile.campaign import Blueprint
from proof.hostile.commands import facts_of
from proof.hostile.runner import load_everything
from proof.hostile.swaps import SCENARIOS, Arena, Scenario, raced, swept
from proof.hostile.victim import Victim, remove_everything

FLIPS = 500
MOST_CALLS = 5000
RACED = ("worktree remove", "worktree create", "scratch of a snapshot", "trees of a snapshot")
"""The races that the issue of a hostile repository names: each is run for 500 rounds in a proof."""


@pytest.fixture
def arena(template: Victim, victim: Victim) -> Callable[[Scenario], Arena]:
    load_everything()
    remove_everything(victim.root)
    return lambda scenario: Arena(victim, Blueprint(template.root), scenario, facts_of(template))


@pytest.mark.parametrize("back", [False, True], ids=["and stays", "and is swapped back"])
@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda each: each.name)
@pytest.mark.sampled(2)
@pytest.mark.timeout(3600)
def test_a_swap_before_any_call_of_a_command_leads_nowhere(
    scenario: Scenario, back: bool, arena: Callable[[Scenario], Arena]
) -> None:
    step = 13 if effort.SHARE >= 1 else 67  # the offset differs from run to run
    tally = swept(arena(scenario), range(1 + effort.SEED % step, MOST_CALLS, step), back=back)
    effort.tried["swaps before a call"] += tally.swapped

    assert tally.swapped > 0
    assert not tally.escapes, f"{len(tally.escapes)} of {tally.swapped}:\n" + "\n".join(tally.escapes[:10])


@pytest.mark.sampled(2)
@pytest.mark.parametrize("scenario", [each for each in SCENARIOS if each.name in RACED], ids=lambda each: each.name)
@pytest.mark.timeout(3600)
def test_no_race_against_a_process_that_swaps_is_lost(scenario: Scenario, arena: Callable[[Scenario], Arena]) -> None:
    wanted = FLIPS if effort.SHARE >= 1 else 6
    tally = raced(arena(scenario), wanted)
    effort.tried["races against swaps"] += tally.swapped

    assert tally.swapped == wanted, "the attacker did not get to swap in every round"
    assert not tally.escapes, f"{len(tally.escapes)} of {tally.rounds}:\n" + "\n".join(tally.escapes[:10])


def test_the_races_are_really_hit(arena: Callable[[Scenario], Arena]) -> None:
    """A directory that is swapped away before the command starts is met by it: so the swap is effective."""
    scenario = next(each for each in SCENARIOS if each.name == "worktree remove above")
    tally = swept(arena(scenario), range(1, 2))

    assert tally.met == 1
    assert rounds(1) == 1
