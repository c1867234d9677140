"""The reference page of the public API, generated from the source without importing it.

So the page does not depend on how a version of Python represents annotations.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path
from textwrap import wrap
from typing import NamedTuple

import holdfast
from tools.command_reference import GENERATED
from tools.python_failures import COMMON, failures

WIDTH = 110
SOURCE = Path(holdfast.__file__).parent
INTRODUCTION = """\
`from holdfast import …` provides the names on this page. They are typed, and each is loaded when it is first used.
Together with [`holdfast.errors`](errors.md), which has a class for every failure, they are the public API; other
modules may change. `holdfast.testing` has a contract suite for authors of other stores. For examples, see
[from Python](../how-to/from-python.md)."""
RETURNED = {
    "HeldClaim": "holdfast.ledger.service",
    "HeldIssueClaim": "holdfast.issues.held_claim",
    "HeldRepoLock": "holdfast.locks.repo_lock",
    "HeldLedgerLock": "holdfast.locks.ledger_lock",
    "LeaseService": "holdfast.leases.service",
    "GarbageCollector": "holdfast.repository.gc",
    "AuditReader": "holdfast.store.audit",
}
"""Classes that programs do not create: methods and attributes of the others return their objects."""
ASYNCHRONOUS = {"AsyncLedger": "Ledger", "AsyncClaims": "Claims"}
"""Classes whose methods are those of another one, for coroutines."""

Definition = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
Method = ast.FunctionDef | ast.AsyncFunctionDef


def python_page() -> str:
    """Every public name with its signature, its docstring and its failures; for classes, also the methods, with those
    of their bases, and the attributes."""
    body = [line for name, module in {**public_names(), **RETURNED}.items() for line in _described(name, module)]
    return "\n".join([GENERATED, "", "# Python", "", INTRODUCTION, "", *COMMON.splitlines(), "", *body])


def public_names() -> dict[str, str]:
    """The public names and their modules."""
    modules: dict[str, str] = vars(holdfast)["_MODULES"]
    return modules


def methods_of(name: str, module: str) -> dict[str, tuple[str, Method]]:
    """The public methods and properties of a class and its bases by name, each with the class that defines it."""
    found: dict[str, tuple[str, Method]] = {}
    for each, _ in _lineage(_defined(name, module)):
        for method in each.body:
            if isinstance(method, Method) and not method.name.startswith("_"):
                found.setdefault(method.name, (each.name, method))
    return found


def is_property(method: Method) -> bool:
    return bool({ast.unparse(each) for each in method.decorator_list} & {"property", "cached_property"})


def failures_of(owner: str, method: str = "") -> tuple[str, ...]:
    """The failures of a function, of creating an object, or of a method."""
    return failures()[f"{ASYNCHRONOUS.get(owner, owner)}.{method}" if method else owner]


def text_of(owner: str, method: Method) -> str:
    """The description of a method."""
    text = ast.get_docstring(method) or ""
    if not text and owner in ASYNCHRONOUS:
        return f"See `{ASYNCHRONOUS[owner]}.{method.name}`."
    return text


def _described(name: str, module: str) -> Iterator[str]:
    found = _defined(name, module)
    yield f"## {name}"
    yield ""
    if isinstance(found[0], ast.ClassDef):
        yield from _class(name, module)
    else:
        yield from _signature(found[0], name)
        yield from _text(ast.get_docstring(found[0]) or "", failures_of(name))


class _Found(NamedTuple):
    definition: Definition
    module: str


@cache
def _source(module: str) -> str:
    path = SOURCE.joinpath(*module.split(".")[1:])
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    return path.read_text(encoding="utf-8")


@cache
def _statements(module: str) -> list[ast.stmt]:
    return ast.parse(_source(module)).body


@cache
def _defined(name: str, module: str) -> _Found:
    for node in _statements(module):
        if isinstance(node, ast.ImportFrom) and name in (each.asname or each.name for each in node.names):
            return _defined(name, str(node.module))  # imported, perhaps to be exported again
        if isinstance(node, Definition) and node.name == name:
            return _Found(node, module)
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name:
            return _defined(ast.unparse(node.value), module)
    raise LookupError(f"{module} has no {name}")


def _lineage(found: _Found) -> Iterator[tuple[ast.ClassDef, str]]:
    """A class and its bases in this package, with their modules."""
    definition, module = found
    assert isinstance(definition, ast.ClassDef)
    yield definition, module
    for base in definition.bases:
        name = ast.unparse(base).partition("[")[0]
        with suppress(LookupError, FileNotFoundError):
            yield from _lineage(_defined(name, module))


def _class(name: str, module: str) -> Iterator[str]:
    found = _defined(name, module)
    lineage = list(_lineage(found))
    makers = (each for owner, _ in lineage for each in owner.body if isinstance(each, Method))
    made = next((each for each in makers if each.name == "__init__"), None)
    if made is not None and name not in RETURNED:
        yield from _signature(made, name)
    listed = failures().get(name, ())
    yield from _text("\n\n".join(filter(None, (ast.get_docstring(each) for each in (found[0], made) if each))), listed)
    lines = [line for owner, where in lineage for line in _fields(owner, where)]
    if lines:
        yield from [*dict.fromkeys(lines), ""]
    for method, (owner, definition) in methods_of(name, module).items():
        yield from _signature(definition, f"{name}.{method}")
        listed = () if is_property(definition) else failures_of(owner, method)
        yield from _text(text_of(name, definition), listed)


def _fields(found: ast.ClassDef, module: str) -> Iterator[str]:
    """The fields of a record, the members of an enumeration, and the attributes that `__init__` sets."""
    comments = [line.partition("  # ")[2] for line in _source(module).splitlines()]
    annotations: dict[str, str] = {}
    body: list[ast.stmt] = list(found.body)
    for each in found.body:
        if isinstance(each, Method) and each.name == "__init__":
            given = [*each.args.posonlyargs, *each.args.args, *each.args.kwonlyargs]
            annotations = {one.arg: ast.unparse(one.annotation) for one in given if one.annotation}
            body += [inner for inner in each.body if isinstance(inner, ast.Assign | ast.AnnAssign)]
    for each in body:
        if isinstance(each, ast.AnnAssign | ast.Assign) and (shown := _field(each, annotations)):
            comment = comments[(each.end_lineno or 1) - 1]
            yield f"    {shown}  # {comment}" if comment and "noqa" not in comment else f"    {shown}"


def _field(found: ast.Assign | ast.AnnAssign, annotations: dict[str, str]) -> str:
    """A field with its type and default, or an attribute with its type; empty for a private one."""
    target = found.target if isinstance(found, ast.AnnAssign) else found.targets[0]
    name = ast.unparse(target)
    if name.removeprefix("self.").startswith("_") or "." in name.removeprefix("self."):
        return ""
    if isinstance(found, ast.AnnAssign):
        if "ClassVar" in ast.unparse(found.annotation):
            return ""
        default = "" if found.value is None or name.startswith("self.") else f" = {ast.unparse(found.value)}"
        return f"{name.removeprefix('self.')}: {ast.unparse(found.annotation)}{default}"
    if not name.startswith("self."):
        return ast.unparse(found) if name.isupper() else ""
    value = found.value
    kind = annotations.get(ast.unparse(value), "")
    if isinstance(value, ast.Call) and ast.unparse(value.func).rpartition(".")[2][:1].isupper():
        kind = ast.unparse(value.func)
    return name.removeprefix("self.") + (f": {kind}" if kind else "")


def _signature(found: Definition, name: str) -> Iterator[str]:
    assert not isinstance(found, ast.ClassDef)
    result = f" -> {ast.unparse(found.returns)}" if found.returns and name != "__init__" else ""
    if is_property(found):
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


def _text(text: str, listed: tuple[str, ...]) -> Iterator[str]:
    for paragraph in text.split("\n\n"):
        if paragraph:
            yield from [paragraph, ""]
    if listed:
        yield from wrap(f"*Raises* {', '.join(f'`{each}`' for each in listed)}.", WIDTH, break_long_words=False)
        yield ""
