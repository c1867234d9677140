"""etcd in a storm: clients on separate machines, and every kind of fault. See `server_storm`."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.store.server_storm import FAULTS, site_of, storm
from tests.support.machines import Network

pytest.importorskip("psycopg", reason="psycopg is not installed here")
pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="the workers are forked")


def test_no_fault_loses_an_acknowledged_commit_or_lets_a_stale_token_commit(
    network: Network, tmp_path: Path, server_scratch: Path
) -> None:
    with site_of("etcd", network, server_scratch) as site:
        totals = storm(site, tmp_path, FAULTS)
    print(f"etcd: {FAULTS} faults; {totals}")  # noqa: T201
