"""The generated reference pages match the code."""

from __future__ import annotations

import pytest

from holdfast.cli.entry import MEANINGS
from holdfast.errors import ExitStatus
from tools.generate_reference import DIRECTORY, PAGES


@pytest.mark.parametrize("name", PAGES)
def test_the_page_is_current(name: str) -> None:
    committed = (DIRECTORY / name).read_text(encoding="utf-8")

    assert committed == PAGES[name](), "run `make docs` and commit the result"


def test_every_exit_status_has_a_distinct_meaning() -> None:
    assert set(MEANINGS) == set(ExitStatus)
    assert len(set(MEANINGS.values())) == len(ExitStatus)
