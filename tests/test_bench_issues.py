"""All contenders of the issue bench do the same work."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from bench.issues import KINDS, Contender


@pytest.mark.skipif(sys.platform == "win32", reason="the floor needs to sync directories")
@pytest.mark.parametrize("kind", KINDS)
def test_each_contender_stores_issues(kind: type[Contender], tmp_path: Path) -> None:
    contender = kind(tmp_path)
    first, *_ = contender.make(3)
    contender.create()
    for _ in range(2):
        contender.update(first)

    assert contender.ready() == 4
    assert kind(tmp_path).counted() == (4, 2)
