"""Pure functions of a dependency graph: paths, an order, cycles; and layers for drawing, dependencies to the left."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

Graph = Mapping[str, Sequence[str]]
"""The issues, each with those that it depends on."""
_SWEEPS = 4


def find_path(edges: Callable[[str], Sequence[str]], start: str, goal: str) -> list[str] | None:
    """A shortest path from `start` to `goal` along dependencies, both included, or None."""
    came_from: dict[str, str] = {}
    todo = deque([start])
    seen = {start}
    while todo:
        here = todo.popleft()
        if here == goal:
            path = [here]
            while path[-1] != start:
                path.append(came_from[path[-1]])
            return path[::-1]
        for each in edges(here):
            if each not in seen:
                seen.add(each)
                came_from[each] = here
                todo.append(each)
    return None


def reachable(edges: Callable[[str], Sequence[str]], starts: Iterable[str]) -> set[str]:
    """Everything reachable from the starts along dependencies, the starts included."""
    seen = set(starts)
    todo = list(seen)
    while todo:
        for each in edges(todo.pop()):
            if each not in seen:
                seen.add(each)
                todo.append(each)
    return seen


def in_order(graph: Graph) -> tuple[list[str], list[list[str]]]:
    """All issues, dependencies first, those on or behind a cycle last; and the cycles, each as a path."""
    waiting = {each: {dep for dep in deps if dep in graph} for each, deps in graph.items()}
    dependents: dict[str, list[str]] = {each: [] for each in graph}
    for each, deps in waiting.items():
        for dep in deps:
            dependents[dep].append(each)
    order: list[str] = []
    todo = deque(each for each, deps in waiting.items() if not deps)
    while todo:
        here = todo.popleft()
        order.append(here)
        for each in dependents[here]:
            waiting[each].discard(here)
            if not waiting[each]:
                todo.append(each)
    done = set(order)
    rest = [each for each in graph if each not in done]
    return order + rest, list(_cycles({each: sorted(waiting[each]) for each in rest}))


def _cycles(graph: Graph) -> Iterator[list[str]]:
    """One cycle of each group of issues that depend on each other."""
    seen: set[str] = set()
    for start in graph:
        path: list[str] = []
        here: str | None = start
        while here is not None and here not in seen and here not in path:
            path.append(here)
            here = next((each for each in graph[here] if each in graph), None)
        if here is not None and here in path:
            around = path[path.index(here) :]
            yield [*around, around[0]]
        seen |= set(path)


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
