"""A repository contacts and runs only what its user has approved on this machine."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from holdfast.errors import Failure, NotApproved, SettingInvalid
from holdfast.repository.init import initialise
from holdfast.repository.ledgers import open_ledger
from holdfast.repository.opening import open_tracker
from holdfast.repository.repository import Repository
from holdfast.store import addresses, approvals
from holdfast.store.approvals import approve, approved, are_approved, require_store, revoke
from holdfast.store.open import configure_store, open_store

ADDRESS = "etcd://db.example:2379/x"


@pytest.fixture(autouse=True)
def _own_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    monkeypatch.setattr(addresses, "_remembered", {})


@pytest.fixture
def root(tmp_path: Path) -> Path:
    path = tmp_path / "repository"
    initialise(path)
    return path


def plant(root: Path, address: str) -> None:
    (root / ".holdfast").mkdir(exist_ok=True)
    (root / ".holdfast/config.json").write_text(f'{{"schema_version": 1, "store": "{address}"}}')


def test_a_configured_store_is_refused_until_it_is_approved_and_again_when_it_changes(root: Path) -> None:
    plant(root, f"file://{root.parent}/elsewhere")
    for opened in (Repository, open_store, open_ledger, lambda path: open_tracker(path, actor="human:x")):
        with pytest.raises(NotApproved, match="elsewhere"):
            opened(root)
    assert not (root.parent / "elsewhere").exists()

    (root.parent / "elsewhere").mkdir()
    approve(root, store=f"file://{root.parent}/elsewhere")
    open_store(root).close()
    plant(root, f"file://{root.parent}/elsewhere2")
    with pytest.raises(NotApproved):
        open_store(root)


def test_the_hint_is_the_command_that_approves(root: Path) -> None:
    plant(root, ADDRESS)
    with pytest.raises(NotApproved) as raised:
        open_store(root)

    assert f"'holdfast trust --repo {root}'" in raised.value.hint
    assert raised.value.facts["store"] == ADDRESS


def test_configuring_and_naming_a_store_approves_it(root: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    address = configure_store(root, f"file://{tmp_path}/elsewhere")
    addresses._remembered.clear()  # as in another process
    open_store(root).close()

    revoke(root)
    with pytest.raises(NotApproved):
        open_store(root)
    addresses.remember(address)  # as HOLDFAST_STORE is
    open_store(root).close()


def test_a_repository_at_another_path_or_with_another_id_is_another_one(root: Path, tmp_path: Path) -> None:
    approve(root, store=ADDRESS, commands=["true"])
    os.symlink(root, tmp_path / "link")
    require_store(tmp_path / "link", ADDRESS)
    os.rename(root, tmp_path / "moved")
    assert are_approved(tmp_path / "moved", ["true"]) == [False]

    initialise(root)
    assert are_approved(root, ["true"]) == [False]
    with pytest.raises(NotApproved):
        require_store(root, ADDRESS)


def test_approvals_are_private_and_have_no_secret(root: Path, tmp_path: Path) -> None:
    approve(root, store="postgresql://me:hunter2@db/x?sslpassword=hunter2&schema=s", commands=["echo hunter2"])
    found = [path for path in (tmp_path / "data").rglob("*") if path.suffix != ".lock"]

    assert {stat.S_IMODE(path.stat().st_mode) for path in found} == {0o700, 0o600}
    assert not any(b"hunter2" in path.read_bytes() for path in found if path.is_file())
    assert approved(root).store == "postgresql://me@db/x?schema=s"


def test_a_data_directory_that_cannot_be_made_is_a_clear_failure(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("HOLDFAST_DATA_DIR", str(tmp_path / "file/data"))
    with pytest.raises(Failure, match="file"):
        approve(root, store=ADDRESS)
    plant(root, ADDRESS)
    with pytest.raises(Failure):
        open_store(root)


def test_two_approvals_at_once_are_both_kept(root: Path) -> None:
    for number in range(3):
        approve(root, commands=[f"make {number}"])
    assert all(are_approved(root, [f"make {number}" for number in range(3)]))


def test_the_id_of_a_strange_format_is_none(root: Path) -> None:
    for text in ("[" * 100_000, "[]", '{"repository_id": 5}', "\0", ""):
        (root / ".jvs/format.json").write_text(text)
        assert approvals.approved(root).repository_id == ""


# --- Addresses --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "address",
    [
        *("etcd://a:99999/p", "etcd://a:0/p", "etcd://a:-1/p", "etcd://a:" + "9" * 5000 + "/p", "etcd://a:²/p"),
        *("etcd://[::1/p", "etcd://::1/p", "etcd://[a]b:1/p", "etcd://a]/p", "etcd://" + "a" * 64 + "/p"),
        *("etcd://a..b/p", "etcd:///p", "etcd://,/p", "etcd://a/\udcff", "etcd://\udcff/p", "postgresql://a/\udcff"),
        *(
            "postgresql://a/x\0",
            "postgresql://a:port/x",
            "postgresql://a/x?schema=\udcff",
            "file://host/x",
            "file:///x%00",
        ),
        *("postgresql:", "etcd:a/b", "", "gopher://x/y", "POSTGRES:x", "etcd://" + ",".join(["a"] * 101) + "/p"),
        *("postgresql://u:p#x@h/d", "postgresql://u:p/x@h/d", "postgresql://u:12/x@h/d", "postgresql://u:p?x@h/d"),
    ],
)
def test_an_address_that_is_none_is_an_invalid_setting(address: str, tmp_path: Path) -> None:
    from holdfast.store.open import open_address

    with pytest.raises(SettingInvalid):
        open_address(tmp_path, address)


@pytest.mark.parametrize(
    ("host", "local"),
    [
        *(("127.0.0.1", True), ("localhost", True), ("::1", True), ("/run/postgresql", True), ("@x", True), ("", True)),
        *(("127.0.0.1.evil.example", False), ("127.evil.example", False), ("10.0.0.1", False), ("localhost.x", False)),
    ],
)
def test_only_loopback_addresses_and_sockets_are_local(host: str, local: bool) -> None:
    assert addresses.is_local(host) is local


@pytest.mark.parametrize(
    ("address", "mode"),
    [
        ("postgresql://db.example/x", "verify-full"),
        ("postgresql://127.0.0.1,db.example/x", "verify-full"),
        ("postgresql:///x?host=db.example", "verify-full"),
        ("postgresql://localhost/x?hostaddr=10.0.0.1", "verify-full"),
        ("postgresql://db.example/x?sslmode=require", "require"),
        ("postgresql://127.0.0.1/x", None),
        ("postgresql:///x", None),
        ("postgresql:///x?host=/run/postgresql", None),
    ],
)
def test_postgresql_on_another_machine_must_prove_its_name_unless_stated(
    address: str, mode: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("psycopg")
    from holdfast.store.postgres_connections import PostgresAddress

    for name in ("PGSSLMODE", "PGSSLROOTCERT", "PGHOST"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    parameters = PostgresAddress.parse(address).parameters
    assert parameters.get("sslmode") == mode
    assert parameters.get("sslrootcert") == ("system" if mode == "verify-full" else None)

    (tmp_path / ".postgresql").mkdir()
    (tmp_path / ".postgresql/root.crt").write_text("")
    assert "sslrootcert" not in PostgresAddress.parse(address).parameters
    monkeypatch.setenv("PGSSLMODE", "disable")
    assert PostgresAddress.parse(address).parameters.get("sslmode") == (mode if mode == "require" else None)


def test_an_etcd_on_another_machine_without_tls_warns_once() -> None:
    import warnings

    from holdfast.errors import NotEncrypted
    from holdfast.store.addresses import EtcdAddress
    from holdfast.store.etcd_gateway import Gateway

    with pytest.warns(NotEncrypted, match="etcd://plain.example/x is not encrypted"):
        Gateway(EtcdAddress.parse("etcd://plain.example/x"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for address in ("etcd://plain.example/x", "etcd://127.0.0.1,[::1]/x", "etcd://plain2.example/x?tls=true"):
            Gateway(EtcdAddress.parse(address))
