"""The ids of nodes: positive numbers joined by dots, such as `1.2.3`, which is a child of `1.2`."""

from __future__ import annotations

import re

from holdfast.errors import NameInvalid

LONGEST = 128
_NODE = re.compile(r"[1-9][0-9]{0,8}(?:\.[1-9][0-9]{0,8})*", re.ASCII)


def node_id(text: str) -> str:
    """The text, if it is the id of a node; else `NameInvalid` says why not."""
    if is_node_id(text):
        return text
    shown = ascii(text)
    raise NameInvalid(
        f"{shown if len(shown) < 100 else shown[:97] + '...'} is not the id of a node",
        hint=f"Node ids are numbers from 1 joined by dots, such as 1 or 1.2.3; at most {LONGEST} characters.",
        what="node",
        name=shown[:160],
    )


def is_node_id(text: object) -> bool:
    """Whether `node_id` would return it."""
    return isinstance(text, str) and len(text) <= LONGEST and _NODE.fullmatch(text) is not None


def is_under(node: str, above: str) -> bool:
    """Whether a node is `above` itself or below it: `1.2.3` is under `1.2`, `1.23` is not."""
    return node == above or node.startswith(above + ".")


def order(node: str) -> tuple[int, ...]:
    """What sorts nodes as people count: `1.2` before `1.10`."""
    return tuple(int(part) for part in node.split("."))
