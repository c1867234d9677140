"""Random mutations and a matrix of damage: no command changes anything outside, hangs, or fails unexpectedly."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from proof import effort
from proof.effort import SEED
from proof.hostile.campaign import COMMANDS_PER_REPOSITORY, matrix_of, size_of_matrix
from proof.hostile.commands import EXEMPT, command_lines, facts_of, leaves
from proof.hostile.victim import Victim

MUTATIONS = {"plain": 16_000, "git": 4_000}
FEW_MUTATIONS = {"plain": 12, "git": 4}
FEW_CELLS = 1
MOST_SHOWN = 25


def campaign(kind: str, template: Victim, first: int, count: int) -> tuple[int, list[dict[str, Any]]]:
    """Run a part of a campaign in its own process; return the number of cases, and the findings."""
    arguments = [kind, str(template.base), str(SEED), str(first), str(count)]
    done = subprocess.run(
        [sys.executable, "-m", "proof.hostile.campaign", *arguments],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        cwd=Path(__file__).parents[2],
    )
    *findings, last = map(json.loads, done.stdout.splitlines())
    return int(last["cases"]), findings


def shown(findings: list[dict[str, Any]]) -> str:
    """The findings, the same ones together."""
    counts = Counter(each["problem"] for each in findings)
    first = {each["problem"]: each for each in reversed(findings)}
    lines = [f"{count} x {problem}; first: {first[problem]}" for problem, count in counts.most_common(MOST_SHOWN)]
    return "\n".join([f"{len(findings)} findings with the seed {SEED}", *lines])


def test_every_command_is_tried_or_has_a_reason_why_not(template: Victim) -> None:
    lines = {str(each) for each in command_lines(facts_of(template))}
    missing = [
        each for each in leaves() if each not in EXEMPT and not any(f"{line} ".startswith(f"{each} ") for line in lines)
    ]

    assert not missing


@pytest.mark.sampled(1)
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("kind", MUTATIONS)
def test_random_mutations_of_a_repository_harm_nobody(kind: str, request: pytest.FixtureRequest) -> None:
    wanted = (MUTATIONS if effort.SHARE >= 1 else FEW_MUTATIONS)[kind]
    cases, findings = campaign("mutations", template_of(kind, request), 0, wanted // COMMANDS_PER_REPOSITORY)
    effort.tried["commands in mutated repositories"] += cases

    assert cases >= wanted
    assert not findings, shown(findings)


@pytest.mark.timeout(7200)
@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", MUTATIONS)
def test_damage_of_every_kind_to_every_file_harms_nobody(kind: str, request: pytest.FixtureRequest) -> None:
    template = template_of(kind, request)
    size = size_of_matrix(template)
    first, count = (0, size) if effort.SHARE >= 1 else (SEED % (size - FEW_CELLS), FEW_CELLS)
    cases, findings = campaign("damage", template, first, count)
    effort.tried["commands in damaged repositories"] += cases

    assert cases == count * len(matrix_of(template))
    assert not findings, shown(findings)


def template_of(kind: str, request: pytest.FixtureRequest) -> Victim:
    """The template with this kind of home, which is made only if it is needed."""
    template: Victim = request.getfixturevalue("git_template" if kind == "git" else "template")
    return template
