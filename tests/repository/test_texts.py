"""Free text from people and agents is stored unchanged, or refused at once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from holdfast.errors import SettingInvalid, TooLarge, UsageFailure
from holdfast.fs.names import LONGEST_DESCRIPTION, LONGEST_TEXT
from holdfast.issues.creating import NewIssue
from holdfast.issues.gates import Definition
from holdfast.issues.tracker import Tracker, Update
from holdfast.repository.history import add_pin, create_reference
from holdfast.repository.repository import Repository
from holdfast.repository.restore import RestoreOptions
from holdfast.store.memory import MemoryStore
from tests.repository.stages import make_repository

pytestmark = pytest.mark.both_homes

Write = Callable[[str], object]


class Place:
    """A repository with a snapshot, and a tracker with an issue."""

    def __init__(self, root: Path) -> None:
        make_repository(root)
        self.repository = Repository(root)
        with self.repository.lease() as lease:
            self.snapshot_id = self.repository.snapshot("main", lease).snapshot_id
        self.tracker = Tracker(MemoryStore())
        self.tracker.initialise()
        self.issue_id = self.create(NewIssue(title="one"))

    def create(self, new: NewIssue) -> str:
        return self.tracker.create_all([new])[0].issue.id

    def update(self, update: Update) -> object:
        return self.tracker.update(self.issue_id, update)

    def note(self, text: str) -> None:
        with self.repository.lease() as lease:
            self.repository.snapshot("main", lease, note=text)

    def restore(self, text: str) -> object:
        how = RestoreOptions(reason=text, path=None, keep=True, allow_shared=False)
        return self.repository.snapshots.plan("main", self.snapshot_id, how)

    def one_line(self) -> dict[str, Write]:
        context, claims = self.repository.context, self.tracker.claims
        return {
            "purpose": lambda text: self.repository.lease(purpose=text).release(),
            "purpose of a steal": lambda text: self.repository.leases.request(purpose=text),
            "note": self.note,
            "label of a worktree": lambda text: self.repository.worktrees.create(f"w{len(text)}", label=text),
            "note of a reference": lambda text: create_reference(context, f"r{len(text)}", self.snapshot_id, note=text),
            "reason of a pin": lambda text: add_pin(context, self.snapshot_id, reason=text),
            "reason": self.restore,
            "title": lambda text: self.create(NewIssue(title=text)),
            "another title": lambda text: self.update(Update(title=text)),
            "label": lambda text: self.create(NewIssue(title="x", labels=(text,))),
            "another label": lambda text: self.update(Update(add_labels=(text,))),
            "purpose of a claim": lambda text: claims.request(purpose=text),
            "title of a gate": lambda text: self.tracker.gates.define(
                Definition(f"g{len(text)}", title=text), replace=True
            ),
        }

    def descriptions(self) -> dict[str, Write]:
        return {
            "description": lambda text: self.create(NewIssue(title="x", description=text)),
            "another": lambda text: self.update(Update(description=text)),
            "of a gate": lambda text: self.tracker.gates.define(Definition("g", description=text), replace=True),
        }


@pytest.fixture
def place(scratch: Path) -> Place:
    return Place(scratch / "repo")


def test_a_text_may_be_as_long_as_its_limit_and_no_longer(place: Place) -> None:
    for limit, texts in ((LONGEST_TEXT, place.one_line()), (LONGEST_DESCRIPTION, place.descriptions())):
        for write in texts.values():
            write("ä" * limit)
            with pytest.raises(TooLarge, match=f"is {limit + 1} characters; the limit is {limit}"):
                write("ä" * (limit + 1))


def test_a_text_that_is_not_unicode_is_refused_and_shown_escaped(place: Place) -> None:
    for write in (*place.one_line().values(), *place.descriptions().values()):
        with pytest.raises(UsageFailure, match=r"'b\\udcff' is not valid UTF-8"):
            write("b\udcff")


def test_a_priority_has_limits(place: Place) -> None:
    with pytest.raises(SettingInvalid, match="from -1000000 to 1000000"):
        place.repository.lease(priority=10**30)


def test_an_assignee_that_is_not_unicode_is_refused(place: Place) -> None:
    with pytest.raises(UsageFailure, match="is not valid UTF-8"):
        place.tracker.claims.request("agent:b\udcff")


def test_the_message_about_a_long_value_is_short(place: Place) -> None:
    with pytest.raises(SettingInvalid) as caught:
        place.tracker.claims.request("agent:" + "x" * 100_000)
    assert len(str(caught.value)) < 400
