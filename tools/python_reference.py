"""The reference page of the public API, generated from the source without importing it.

So the page does not depend on how a version of Python represents annotations.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from textwrap import wrap

import holdfast
from tools.command_reference import GENERATED

WIDTH = 110
SOURCE = Path(holdfast.__file__).parent
INTRODUCTION = """\
`from holdfast import …` provides the names on this page. They are typed, and each is loaded when it is first used.
Together with [`holdfast.errors`](errors.md), which has a class for every failure, they are the public API; other
modules may change. `holdfast.testing` has a contract suite for authors of other stores. For examples, see
[from Python](../how-to/from-python.md)."""

Definition = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def python_page() -> str:
    """Every public name with its signature and its docstring; for classes, also the methods."""
    body = [line for name, module in _modules().items() for line in _described(name, module)]
    return "\n".join([GENERATED, "", "# Python", "", INTRODUCTION, "", *body])


def _modules() -> dict[str, str]:
    modules: dict[str, str] = vars(holdfast)["_MODULES"]
    return modules


def _described(name: str, module: str) -> Iterator[str]:
    found = _defined(name, module)
    yield f"## {name}"
    yield ""
    if isinstance(found, ast.ClassDef):
        yield from _class(found)
    else:
        yield from _signature(found, name)
        yield from _text(found)


def _defined(name: str, module: str) -> Definition:
    path = SOURCE.joinpath(*module.split(".")[1:])
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    body = ast.parse(path.read_text(encoding="utf-8")).body
    for node in body:
        if isinstance(node, ast.ImportFrom) and name in (each.asname for each in node.names):
            return _defined(name, str(node.module))  # re-exported
        if isinstance(node, Definition) and node.name == name:
            return node
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name:
            return _defined(ast.unparse(node.value), module)
    raise LookupError(f"{module} has no {name}")


def _class(found: ast.ClassDef) -> Iterator[str]:
    members = [each for each in found.body if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)]
    made = next((each for each in members if each.name == "__init__"), None)
    if made is not None:
        yield from _signature(made, found.name)
    yield from _text(found)
    yield from _fields(found)
    for each in members:
        if not each.name.startswith("_"):
            yield from _signature(each, f"{found.name}.{each.name}")
            yield from _text(each)


def _fields(found: ast.ClassDef) -> Iterator[str]:
    """The fields of a record, or the members of an enumeration."""
    lines = []
    for each in found.body:
        if isinstance(each, ast.AnnAssign) and not ast.unparse(each.target).startswith("_"):
            default = "" if each.value is None else f" = {ast.unparse(each.value)}"
            lines.append(f"    {ast.unparse(each.target)}: {ast.unparse(each.annotation)}{default}")
        elif isinstance(each, ast.Assign) and ast.unparse(each.targets[0]).isupper():
            lines.append(f"    {ast.unparse(each)}")
    if lines:
        yield from [*lines, ""]


def _signature(found: Definition, name: str) -> Iterator[str]:
    assert not isinstance(found, ast.ClassDef)
    decorators = {ast.unparse(each) for each in found.decorator_list}
    result = f" -> {ast.unparse(found.returns)}" if found.returns and name != "__init__" else ""
    if decorators & {"property", "cached_property"}:
        yield from [f"    {name}: {result.removeprefix(' -> ')}", ""]
        return
    arguments = ast.unparse(found.args)
    for own in ("self, ", "self", "cls, ", "cls"):
        if arguments.startswith(own):
            arguments = arguments.removeprefix(own)
            break
    prefix = "async " if isinstance(found, ast.AsyncFunctionDef) else ""
    result = "" if result == " -> None" else result
    text = f"{prefix}{name}({arguments}){result}"
    first, then = " " * 4, " " * 8
    yield from wrap(text, WIDTH, initial_indent=first, subsequent_indent=then, break_long_words=False)
    yield ""


def _text(found: Definition) -> Iterator[str]:
    for paragraph in (ast.get_docstring(found) or "").split("\n\n"):
        if paragraph:
            yield from [paragraph, ""]
