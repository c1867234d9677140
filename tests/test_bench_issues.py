"""The contenders of the bench of issues do the same, one at a time."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from bench.issues import KINDS, Contender


@pytest.mark.skipif(sys.platform == "win32", reason="the floor needs directories that can be synced")
@pytest.mark.parametrize("kind", KINDS)
def test_each_contender_keeps_issues(kind: type[Contender], tmp_path: Path) -> None:
    contender = kind(tmp_path)
    first, *_ = contender.make(3)
    contender.create()
    for _ in range(2):
        contender.update(first)

    assert contender.ready() == 4
    assert kind(tmp_path).counted() == (4, 2)
