"""Layers for drawing: dependencies to the left, few crossings, the longest chain marked."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from holdfast.issues.graph import Layering, layered


def test_an_issue_is_behind_all_that_it_depends_on() -> None:
    found = layered({"a": [], "b": ["a"], "c": ["a", "b"], "d": []})
    assert found.layers == (("a", "d"), ("b",), ("c",))
    assert found.critical == ("a", "b", "c")


def test_the_critical_path_has_open_issues_only() -> None:
    graph = {"a": [], "b": ["a"], "c": ["b"], "x": [], "y": ["x"]}
    assert layered(graph, open_ones=frozenset("cxy")).critical == ("x", "y")


def test_nothing_is_an_empty_picture() -> None:
    assert layered({}) == Layering((), ())
    assert layered({"a": ["gone"]}).layers == (("a",),)


def test_a_cycle_that_another_program_made_is_drawn_too() -> None:
    found = layered({"a": ["b"], "b": ["a"], "c": ["b"]})
    assert sorted(name for layer in found.layers for name in layer) == ["a", "b", "c"]


def test_crossing_edges_are_untangled() -> None:
    graph: dict[str, list[str]] = {"a": [], "b": [], "y": ["b"], "x": ["a"]}
    first, second = layered(graph).layers
    assert [{"a": "x", "b": "y"}[name] for name in first] == list(second)


@given(st.integers(0, 10_000), st.integers(1, 40))
def test_every_edge_points_right_and_nothing_is_lost(seed: int, count: int) -> None:
    chance = random.Random(seed)
    names = [f"n{number}" for number in range(count)]
    graph = {name: chance.sample(names[:place], min(place, chance.randrange(3))) for place, name in enumerate(names)}
    found = layered(graph)
    layer = {name: number for number, each in enumerate(found.layers) for name in each}
    assert layer.keys() == graph.keys()
    assert all(layer[on] < layer[name] for name, depends in graph.items() for on in depends)
    assert len(found.critical) in (0, len(found.layers))
