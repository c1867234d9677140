"""Versions of etcd that are known to lose data are refused, unless the address accepts them."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from holdfast.errors import StoreUnsafe
from holdfast.store import etcd_gateway
from holdfast.store.addresses import accepting_unsafe_server
from holdfast.store.etcd import EtcdStore
from holdfast.store.etcd_gateway import server_version
from holdfast.store.open import open_address, same_store
from holdfast.testing.backend import INDEX
from tests.cli.commands import data, error, holdfast
from tests.support.servers import Etcd, sound_etcd


@pytest.mark.parametrize(
    ("version", "unsafe"),
    [
        *(("3.3.27", False), ("3.4.19", False), ("3.4.20", True), ("3.4.21", True), ("3.4.22", False)),
        *(("3.5.0-rc.1", True), ("3.5.0", True), ("3.5.2", True), ("3.5.3", True), ("3.5.5", True)),
        *(("3.5.6", False), ("3.5.12", False), ("3.6.0", False), ("", False), ("unknown", False)),
    ],
)
def test_the_versions_that_etcd_warns_of_are_unsafe(version: str, unsafe: bool) -> None:
    assert bool(server_version(version).risk) is unsafe


def strict(address: str) -> str:
    return accepting_unsafe_server(address, accept=False)


def test_a_store_on_an_unsafe_etcd_is_refused_with_the_reason(tmp_path: Path, etcd_url: str) -> None:
    with EtcdStore(strict(etcd_url)) as store:
        for _ in range(2):  # each time
            with pytest.raises(StoreUnsafe, match=r"runs etcd 3\.5\.1, which can lose acknowledged data") as refused:
                store.read(INDEX)
    assert not refused.value.retryable
    assert "accept-unsafe-server=true" in refused.value.hint
    with pytest.raises(StoreUnsafe):
        open_address(tmp_path, strict(etcd_url)).watch(INDEX)


def test_each_server_is_asked_for_its_version_once_per_process(etcd_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(etcd_gateway, "_versions", {})
    asked: list[bytes] = []
    read = etcd_gateway._version_in

    def note(content: bytes) -> str:
        asked.append(content)
        return read(content)

    monkeypatch.setattr(etcd_gateway, "_version_in", note)
    for _ in range(3):
        with EtcdStore(etcd_url) as store:
            store.read(INDEX)
            assert str(store.version) == "etcd 3.5.1"
    assert len(asked) == 1


def test_threads_that_meet_an_unsafe_etcd_together_are_all_refused(
    etcd_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(etcd_gateway, "_versions", {})

    def refused_always(_: int) -> bool:
        with EtcdStore(strict(etcd_url)) as store:
            for _ in range(25):
                with pytest.raises(StoreUnsafe):
                    store.read(INDEX)
        return True

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)  # the threads meet between any two steps
    try:
        with ThreadPoolExecutor(8) as threads:
            assert all(threads.map(refused_always, range(8)))
    finally:
        sys.setswitchinterval(interval)


def test_a_sound_etcd_needs_no_acceptance(server_scratch: Path) -> None:
    server = Etcd(server_scratch, program=sound_etcd())
    server.start()
    try:
        with EtcdStore(strict(server.store_url("x"))) as store:
            assert store.read(INDEX) is None
            assert store.version is not None
            assert not store.version.risk
            space = store.space()  # 3.4 answers without a header here
            assert space is not None
            assert (space.size > 0, space.alarms) == (True, ())
    finally:
        server.kill()


def test_the_acceptance_is_no_part_of_the_place(tmp_path: Path, etcd_url: str) -> None:
    assert same_store(tmp_path, etcd_url, strict(etcd_url))
    assert not same_store(tmp_path, etcd_url, etcd_url.replace("?", "-other?"))


@pytest.mark.long
def test_a_trial_is_accepted_once_and_shown_by_info_and_doctor(tmp_path: Path, etcd_url: str) -> None:
    root, address = tmp_path / "repository", strict(etcd_url)
    refused = holdfast("init", root, "--store", address, "--json")
    assert (refused.returncode, error(refused)["code"]) == (7, "E_STORE_UNSAFE")
    assert not root.exists()
    assert holdfast("init", root, "--store", address, "--accept-unsafe-server").returncode == 0
    assert holdfast("run", "--repo", root, "--", "true").returncode == 0

    info = data(holdfast("info", "--repo", root, "--json"))
    assert info["server"] == "etcd 3.5.1"
    assert any("can lose acknowledged data" in each for each in info["warnings"])
    assert "(etcd 3.5.1)" in holdfast("info", "--repo", root).stdout
    doctor = data(holdfast("doctor", "--repo", root, "--json"))
    assert doctor["server"] == "etcd 3.5.1"
    assert [each["code"] for each in doctor["findings"]] == ["store-risky"]

    (root / ".holdfast/config.json").write_text((root / ".holdfast/config.json").read_text().replace("=true", "=no"))
    changed = error(holdfast("doctor", "--repo", root, "--json"))["findings"]
    assert [each["code"] for each in changed] == ["store-unusable", "checks-not-made"]  # it must be approved again
    holdfast("trust", "--repo", root, "--yes")
    examined = error(holdfast("doctor", "--repo", root, "--json"))["findings"]
    assert [each["code"] for each in examined] == ["store-unsafe", "checks-not-made"]
    assert error(holdfast("run", "--repo", root, "--json", "--", "true"), on="stderr")["code"] == "E_STORE_UNSAFE"


def test_records_move_to_an_unsafe_etcd_only_if_that_is_accepted(tmp_path: Path, etcd_url: str) -> None:
    root, address = tmp_path / "repository", strict(etcd_url)
    holdfast("init", root)
    assert error(holdfast("migrate", root, "--to", address, "--json"))["code"] == "E_STORE_UNSAFE"
    assert holdfast("migrate", root, "--to", address, "--accept-unsafe-server").returncode == 0
    again = holdfast("migrate", root, "--to", address, "--json")
    assert error(again)["code"] == "E_USAGE"  # it is the same store


def test_the_version_of_postgresql_is_shown(tmp_path: Path, postgres_url: str) -> None:
    holdfast("init", tmp_path / "repository", "--store", postgres_url)
    shown = data(holdfast("info", "--repo", tmp_path / "repository", "--json"))
    assert shown["server"].startswith("PostgreSQL 1")
    assert shown["warnings"] == []
