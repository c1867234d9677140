"""A directory that is exchanged with a link while a command works in it leads nobody astray."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from proof import effort
from proof.effort import rounds
from proof.hostile.campaign import Blueprint
from proof.hostile.commands import facts_of
from proof.hostile.runner import load_everything
from proof.hostile.swaps import GIT_SCENARIOS, SCENARIOS, Arena, Scenario, raced, swept
from proof.hostile.victim import remove_everything

FLIPS = 500
MOST_LOOKUPS = 5000
RACED = ("worktree remove", "worktree create", "scratch of a snapshot", "trees of a snapshot")
"""The races that the issue of a hostile repository names: each is run for 500 rounds in a proof."""


Make = Callable[[Scenario], Arena]


@pytest.fixture
def arena(request: pytest.FixtureRequest) -> Make:
    load_everything()

    def make(scenario: Scenario) -> Arena:
        home = "git_" if scenario in GIT_SCENARIOS else ""
        template, victim = (request.getfixturevalue(f"{home}{name}") for name in ("template", "victim"))
        remove_everything(victim.repository)
        return Arena(victim, Blueprint(template), scenario, facts_of(template))

    return make


@pytest.mark.parametrize("back", [False, True], ids=["and stays", "and is swapped back"])
@pytest.mark.parametrize("scenario", [*SCENARIOS, *GIT_SCENARIOS], ids=lambda each: each.name)
@pytest.mark.sampled(1)
@pytest.mark.timeout(3600)
def test_a_swap_before_any_lookup_of_a_command_leads_nowhere(scenario: Scenario, back: bool, arena: Make) -> None:
    step = 1 if effort.SHARE >= 1 else 7
    tally = swept(arena(scenario), range(1 + effort.SEED % step, MOST_LOOKUPS, step), back=back)
    effort.tried["swaps before a lookup"] += tally.swapped

    assert tally.swapped > 0 or step > 1  # a sample may begin behind the last lookup of a short command
    assert not tally.escapes, f"{len(tally.escapes)} of {tally.swapped}:\n" + "\n".join(tally.escapes[:10])


@pytest.mark.sampled(1)
@pytest.mark.parametrize("scenario", [each for each in SCENARIOS if each.name in RACED], ids=lambda each: each.name)
@pytest.mark.timeout(3600)
def test_no_race_against_a_process_that_swaps_is_lost(scenario: Scenario, arena: Make) -> None:
    wanted = FLIPS if effort.SHARE >= 1 else 6
    tally = raced(arena(scenario), wanted)
    effort.tried["races against swaps"] += tally.swapped

    assert tally.swapped == wanted, "the attacker did not get to swap in every round"
    assert not tally.escapes, f"{len(tally.escapes)} of {tally.rounds}:\n" + "\n".join(tally.escapes[:10])


def test_the_races_are_really_hit(arena: Make) -> None:
    """A directory that is swapped away before the command starts is met by it: so the swap is effective."""
    scenario = next(each for each in SCENARIOS if each.name == "worktree remove above")
    tally = swept(arena(scenario), range(1, 2))

    assert tally.met == 1
    assert rounds(1) == 1
