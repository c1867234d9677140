"""Layers of a dependency graph, for drawing: dependencies are to the left of an issue. Pure functions of edges."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from holdfast.issues.rules import in_order

Graph = Mapping[str, Sequence[str]]
"""The issues, each with those that it depends on."""
_SWEEPS = 4


class Layering(NamedTuple):
    """The issues in layers from left to right, each from top to bottom; and the longest chain, first to last."""

    layers: tuple[tuple[str, ...], ...]
    critical: tuple[str, ...]


def layered(graph: Graph, *, open_ones: frozenset[str] | None = None) -> Layering:
    """Put each issue one layer behind the last one that it depends on, and order layers so that few edges cross. The
    critical path is the longest chain of `open_ones` (default: all). Edges of a cycle, which other programs may have
    made, are left out where they point back."""
    inside = {name: [on for on in graph[name] if on in graph and on != name] for name in graph}
    ordered, _ = in_order(inside)
    depth: dict[str, int] = {}
    length: dict[str, int] = {}
    before: dict[str, str] = {}
    counted = frozenset(inside) if open_ones is None else open_ones
    for name in ordered:
        known = [on for on in inside[name] if on in depth]
        depth[name] = 1 + max((depth[on] for on in known), default=-1)
        last = max((on for on in known if on in counted), key=lambda on: length[on], default=None)
        length[name] = (name in counted) + (length[last] if last is not None else 0)
        if last is not None:
            before[name] = last
    layers: list[list[str]] = [[] for _ in range(1 + max(depth.values(), default=-1))]
    for name in ordered:
        layers[depth[name]].append(name)
    _untangle(layers, inside)
    return Layering(tuple(map(tuple, layers)), _chain(length, before, counted))


def _chain(length: Mapping[str, int], before: Mapping[str, str], counted: frozenset[str]) -> tuple[str, ...]:
    ends = [name for name in length if name in counted]
    if not ends:
        return ()
    name: str | None = max(ends, key=lambda each: length[each])
    found: list[str] = []
    while name is not None:
        found.append(name)
        name = before.get(name)
    return tuple(reversed(found)) if len(found) > 1 else ()


def _untangle(layers: list[list[str]], inside: Mapping[str, Sequence[str]]) -> None:
    """Move each issue to the mean position of its neighbours, from left to right and back."""
    outside: dict[str, list[str]] = {name: [] for name in inside}
    for name, depends in inside.items():
        for on in depends:
            outside[on].append(name)
    place = {name: float(number) for layer in layers for number, name in enumerate(layer)}
    for sweep in range(_SWEEPS):
        forward = sweep % 2 == 0
        for layer in layers if forward else reversed(layers):
            near = inside if forward else outside

            def mean(name: str, near: Mapping[str, Sequence[str]] = near) -> float:
                found = [place[each] for each in near[name]]
                return sum(found) / len(found) if found else place[name]

            layer.sort(key=mean)
            place.update((name, float(number)) for number, name in enumerate(layer))
