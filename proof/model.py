"""Compares a store with the model, `MemoryStore`, over random sequences of operations.

    def test_it_behaves_like_the_model(tmp_path: Path) -> None:
        def fresh() -> StoreSubject:
            path = Path(tempfile.mkdtemp(dir=tmp_path))
            return StoreSubject(MyStore(path), lambda: MyStore(path))

        run_state_machine(fresh)

Each operation runs on both. They must return the same records, names and failure codes. Versions and
positions are each store's own; only their changes are compared.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from holdfast.errors import Failure, LockConflict
from holdfast.store.memory import MemoryStore
from holdfast.store.model import MOST_BYTES, Append, Change, Create, Decision, Delete, Key, Replace, Store, Stream, View
from holdfast.testing.backend import DESCRIPTORS, GATES, INDEX, ISSUES, STREAMS, WORKTREES, Event, Item


class StoreSubject(NamedTuple):
    """A store on fresh state, how to open another client of it, and how to dispose of it."""

    store: Store
    reopen: Callable[[], Store]
    dispose: Callable[[], object] = lambda: None


KEYS: list[Key[Item]] = [
    INDEX,
    GATES,
    *(ISSUES.key(each) for each in ("a", "a-b", "A")),
    DESCRIPTORS.key("a"),
    WORKTREES.key("a"),
]
FAMILIES = (ISSUES, DESCRIPTORS, WORKTREES)

TOO_LARGE = Item(0, "stands for a text that is too large")

_long = st.just("x").map(lambda text: text * 5000)
_texts = st.one_of(st.text(max_size=8), st.sampled_from(["\n", "\r\n", "é\u2028"]), _long)
_items = st.builds(Item, st.integers(-(2**53), 2**53), _texts)
_events = st.builds(Event, st.integers(0, 9), _texts)
_keys = st.sampled_from(KEYS)
_streams = st.sampled_from(STREAMS)
_changes: st.SearchStrategy[Change] = st.one_of(
    st.builds(Create, _keys, _items),
    st.builds(Create, _keys, _items),
    st.builds(Replace, _keys, _items),
    st.builds(Replace, _keys, _items),
    st.builds(Delete, _keys),
    st.builds(Append, _streams, _events),
    st.builds(Append, _streams, _events),
    st.builds(Replace, _keys, st.just(TOO_LARGE)),
)


class StoreMachine(RuleBasedStateMachine):
    """Performs every operation on both stores and compares the results."""

    fresh: Callable[[], StoreSubject]

    def __init__(self) -> None:
        super().__init__()
        self.model = MemoryStore()
        self.subject = type(self).fresh()
        self.store = self.subject.store
        self.positions: dict[str, list[int]] = {stream.name: [0] for stream in STREAMS}

    def teardown(self) -> None:
        self.store.close()
        self.subject.dispose()

    # --- Operations ----------------------------------------------------------------------------------

    @rule(changes=st.lists(_changes, max_size=6), forgotten=st.sampled_from([0, 0, 0, 0, 0, 1]))
    def transact(self, changes: list[Change], forgotten: int) -> None:
        """Commit changes, sometimes without naming one of them."""
        changes = [_enlarged(each) for each in changes]
        named = [each.stream if isinstance(each, Append) else each.key for each in changes]
        expected, _ = _outcome(self.model, named[forgotten:], changes)
        found, positions = _outcome(self.store, named[forgotten:], changes)

        assert found == expected
        if found == "committed":
            appends = [each for each in changes if isinstance(each, Append)]
            assert len(positions) == len(appends)
            for each, position in zip(appends, positions, strict=True):
                self.positions[each.stream.name].append(position)

    @rule(changes=st.lists(_changes, min_size=1, max_size=3))
    def make_fitting_changes(self, changes: list[Change]) -> None:
        """Commit changes that are always accepted, so that there is something to compare."""
        fitting: dict[Key[Any] | int, Change] = {}
        for number, each in enumerate(changes):
            if isinstance(each, Append):
                fitting[number] = each
            elif isinstance(each, Delete) and self.model.read(each.key) is None:
                continue
            elif isinstance(each, Delete):
                fitting[each.key] = each
            else:
                kind = Create if self.model.read(each.key) is None else Replace
                fitting[each.key] = kind(each.key, Item(0) if each.record == TOO_LARGE else each.record)
        self.transact(list(fitting.values()), 0)

    @rule(keys=st.lists(_keys, min_size=1, max_size=4))
    def refuse_in_the_decision(self, keys: list[Key[Item]]) -> None:
        """Raise in the decide function, after reading everything."""
        seen: list[list[Item | None]] = []

        def decide(view: View, now: float) -> Decision[None]:
            seen.append([view.get(key) for key in keys])
            raise LockConflict("refused")

        for store in (self.model, self.store):
            try:
                store.transact(keys, decide)
            except LockConflict:
                continue
            raise AssertionError("a decision that raised was committed")
        assert seen[0] == seen[-1]

    @rule()
    def reopen(self) -> None:
        """Continue with another client."""
        self.store.close()
        self.store = self.subject.reopen()

    # --- Results -------------------------------------------------------------------------------------

    @rule(keys=st.lists(_keys, max_size=4))
    def read_together(self, keys: list[Key[Item]]) -> None:
        expected, found = self.model.read_together(keys), self.store.read_together(keys)
        assert [found.get(key) for key in keys] == [expected.get(key) for key in keys]

    @rule(stream=_streams, draw=st.data())
    def entries(self, stream: Stream[Event], draw: st.DataObject) -> None:
        """Read a stream from any of its positions."""
        positions = self.positions[stream.name]
        index = draw.draw(st.integers(0, len(positions) - 1))
        found = list(self.store.entries(stream, after=positions[index]))
        expected = list(self.model.entries(stream, after=index))

        assert [each.record for each in found] == [each.record for each in expected]
        assert [each.position for each in found] == positions[index + 1 :]

    @rule()
    def compare_the_ends(self) -> None:
        def decide(view: View, now: float) -> Decision[list[tuple[int, Any]]]:
            return Decision([], [(view.end(each), view.last(each)) for each in STREAMS])

        expected = self.model.transact(STREAMS, decide).result
        found = self.store.transact(STREAMS, decide).result
        assert [last and last.record for _, last in found] == [last and last.record for _, last in expected]
        assert [end for end, _ in found] == [self.positions[each.name][-1] for each in STREAMS]

    @invariant()
    def the_documents_are_the_same(self) -> None:
        for key in KEYS:
            expected, found = self.model.read(key), self.store.read(key)
            assert (found and found.record) == (expected and expected.record), key.name
        for family in FAMILIES:
            scanned = {name: document.record for name, document in self.store.scan(family)}
            assert scanned == {name: document.record for name, document in self.model.scan(family)}
            assert list(scanned) == sorted(scanned)


def run_state_machine(
    fresh: Callable[[], StoreSubject], *, examples: int = 50, steps: int = 25, shrink: bool = True
) -> None:
    """Compare the stores that `fresh` makes, one for each example, with the model.

    If they differ, Hypothesis searches for the shortest sequence that shows it, unless `shrink` is off.
    """
    machine = type("ComparedStore", (StoreMachine,), {"fresh": staticmethod(fresh)})
    phases = [each for each in Phase if shrink or each not in (Phase.shrink, Phase.explain)]
    run_state_machine_as_test(
        machine, settings=settings(max_examples=examples, stateful_step_count=steps, deadline=None, phases=phases)
    )


def _outcome(store: Store, named: Sequence[Any], changes: Sequence[Change]) -> tuple[str, tuple[int, ...]]:
    """`committed` or the code of the failure, and the positions."""
    try:
        return "committed", store.transact(named, lambda view, now: Decision(changes, None)).positions
    except Failure as failure:
        return failure.code, ()


def _enlarged(change: Change) -> Change:
    if isinstance(change, Replace) and change.record == TOO_LARGE:
        return Replace(change.key, Item(0, "x" * MOST_BYTES))
    return change
