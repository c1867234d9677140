"""A lander that is killed or stopped at any step: the next one finishes, and nothing lands twice."""

from __future__ import annotations

import sys
from itertools import count
from pathlib import Path

import pytest

from holdfast.repository.landing_records import LandingState
from tests.repository.landings import Project, Steps, die, ended, forked, stopped_at

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="forks and kills")


@pytest.fixture
def project(scratch: Path) -> Project:
    return Project(scratch)


def test_a_lander_that_is_killed_at_any_step_is_succeeded_by_one_that_finishes(project: Project) -> None:
    project.write("src/f3", "an edit\n")
    for number in count(1):
        one = project.queue(project.commit({"src/f0": f"{number}\n", f"new/{number}": "new\n"}))
        two = project.queue(project.commit({"src/f1": f"{number}\n", f"new/{number - 1}": None}))

        def work() -> None:
            Steps(number, die).install()
            project.landings().wait(two.landing_id)

        status = ended(forked(work))
        assert status in (0, -9)
        project.end_lease()
        project.landings().work_off()
        assert project.entry(one).state is project.entry(two).state is LandingState.LANDED, number
        project.verdict(edits="M src/f3")
        if status == 0:
            break
    print(number)


def test_a_lander_that_is_stopped_for_longer_than_its_lease_changes_nothing_when_it_continues(project: Project) -> None:
    project.write("src/f3", "an edit\n")
    for number in count(1):
        one = project.queue(project.commit({"src/f0": f"{number}\n", f"new/{number}": "new\n"}))
        two = project.queue(project.commit({"src/f1": f"{number}\n", f"new/{number - 1}": None}))
        with stopped_at(number, lambda: project.landings().wait(two.landing_id)) as child:
            project.end_lease()
            project.landings().work_off()
            three = project.queue(project.commit({"src/f2": f"{number}\n"}))
            project.landings().work_off()
        project.landings().work_off()
        for each in (one, two, three):
            assert project.entry(each).state is LandingState.LANDED, number
        project.verdict(edits="M src/f3")
        if child is None:
            break
    print(number)
