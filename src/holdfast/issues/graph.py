"""Dependencies as a graph: paths, circles, orders. Pure functions; `graph[a]` are what `a` depends on."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

Edges = Mapping[str, Sequence[str]]


def find_path(edges: Callable[[str], Sequence[str]], start: str, goal: str) -> list[str] | None:
    """A shortest way from `start` to `goal` along dependencies, both included; None if there is none."""
    came_from: dict[str, str] = {}
    todo = deque([start])
    seen = {start}
    while todo:
        here = todo.popleft()
        if here == goal:
            way = [here]
            while way[-1] != start:
                way.append(came_from[way[-1]])
            return way[::-1]
        for each in edges(here):
            if each not in seen:
                seen.add(each)
                came_from[each] = here
                todo.append(each)
    return None


def reachable(edges: Callable[[str], Sequence[str]], starts: Iterable[str]) -> set[str]:
    """All that can be reached from the starts along dependencies, the starts included."""
    seen = set(starts)
    todo = list(seen)
    while todo:
        for each in edges(todo.pop()):
            if each not in seen:
                seen.add(each)
                todo.append(each)
    return seen


def in_order(graph: Edges) -> tuple[list[str], list[list[str]]]:
    """All issues, what they depend on first; and the circles, each as the way around it.

    An issue that is on a circle or depends on one stands at the end of the order.
    """
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
    return order + rest, list(_circles({each: sorted(waiting[each]) for each in rest}))


def _circles(graph: Edges) -> Iterator[list[str]]:
    """One circle from each knot of issues that depend on each other."""
    seen: set[str] = set()
    for start in graph:
        way: list[str] = []
        here: str | None = start
        while here is not None and here not in seen and here not in way:
            way.append(here)
            here = next((each for each in graph[here] if each in graph), None)
        if here is not None and here in way:
            circle = way[way.index(here) :]
            yield [*circle, circle[0]]
        seen |= set(way)
