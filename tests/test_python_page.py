"""The page of the Python API: every public method and attribute, with a description and its failures."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator

import pytest

import holdfast
from holdfast.errors import Failure, all_failures
from tools import python_reference
from tools.python_failures import COMMON, failures
from tools.python_reference import ASYNCHRONOUS, RETURNED, Method, is_property, methods_of, public_names, text_of

NAMES = {each.__name__ for each in all_failures()}
COMMONLY_RAISED = {name for name in NAMES if f"`{name}`" in COMMON}
CLASSES = {name: module for name, module in {**public_names(), **RETURNED}.items() if name[0].isupper()}


@pytest.fixture(scope="module")
def page() -> str:
    return python_reference.python_page()


def methods() -> Iterator[tuple[str, str, Method]]:
    """The public methods and properties: the class on the page, the class that defines it, and its definition."""
    for name, module in CLASSES.items():
        for owner, method in methods_of(name, module).values():
            yield name, owner, method


@pytest.mark.parametrize("name", [each for each in holdfast.__all__ if each[0].isupper()])
def test_the_page_has_every_public_member_that_the_class_has(name: str, page: str) -> None:
    offered = getattr(holdfast, name)
    ours = (each for each in offered.__mro__ if each.__module__.startswith("holdfast"))
    for member in {member for each in ours for member in vars(each) if not member.startswith("_")}:
        if inspect.isroutine(inspect.getattr_static(offered, member)):
            assert re.search(rf"^    (async )?{name}\.{member}[(:]", page, re.MULTILINE), member


@pytest.mark.parametrize("attribute", ["lost: threading.Event", "ttl: float", "context: RepositoryContext"])
def test_the_page_has_attributes_that_a_constructor_sets(attribute: str, page: str) -> None:
    assert f"\n    {attribute}" in page


def test_every_method_is_described() -> None:
    assert [f"{name}.{method.name}" for name, _, method in methods() if not text_of(name, method)] == []


def test_the_failures_of_every_function_and_method_are_listed() -> None:
    listed = failures()
    named = {f"{ASYNCHRONOUS.get(owner, owner)}.{each.name}" for _, owner, each in methods() if not is_property(each)}
    functions = {name for name in public_names() if name not in CLASSES}
    missing = (named | functions) - set(listed)
    superfluous = set(listed) - named - functions - set(CLASSES)
    assert (missing, superfluous - {"Ledger.sequence"}) == (set(), set())
    assert {each for found in listed.values() for each in found} <= NAMES


def test_failures_that_a_method_raises_or_describes_are_listed() -> None:
    for _, owner, method in methods():
        if is_property(method):
            continue
        listed = {*failures()[f"{ASYNCHRONOUS.get(owner, owner)}.{method.name}"], *COMMONLY_RAISED}
        raised = {
            ast.unparse(each.exc.func)
            for each in ast.walk(method)
            if isinstance(each, ast.Raise) and isinstance(each.exc, ast.Call)
        }
        described = set(re.findall(r"`(\w+)`", ast.get_docstring(method) or ""))
        found = (raised | described) & NAMES
        assert {each for each in found if not _is_covered(each, listed)} == set(), f"{owner}.{method.name}"


def _is_covered(name: str, listed: set[str]) -> bool:
    """Whether the failure, or one that it is a kind of, is listed."""
    by_name = {each.__name__: each for each in all_failures()}
    return any(each.__name__ in listed for each in by_name[name].__mro__ if issubclass(each, Failure))


def test_no_public_signature_hides_its_options() -> None:
    for name, _, method in methods():
        hidden = method.args.kwarg
        assert hidden is None or ast.unparse(hidden.annotation or ast.Constant("")) != "Any", f"{name}.{method.name}"
