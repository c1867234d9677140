"""etcd under clients on machines of their own, while everything fails that can: see `server_storm`."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.store.server_storm import FAULTS, site_of, storm
from tests.support.machines import Network

pytest.importorskip("psycopg", reason="psycopg is not installed here")
pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="the workers are forked")


def test_whatever_fails_nothing_acknowledged_is_lost_and_no_stale_token_commits(
    network: Network, tmp_path: Path, server_scratch: Path
) -> None:
    with site_of("etcd", network, server_scratch) as site:
        told = storm(site, tmp_path, FAULTS)
    print(f"etcd: {FAULTS} faults; {told}")  # noqa: T201
