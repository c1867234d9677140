"""Attacks on trust: commands, store addresses and names that a repository brings along."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

from proof.hostile.victim import Victim, read_json, write
from tests.attacks.planting import Attack, change_record, link, pretty

STORE_AIMS = (
    *("status", "who", "info", "doctor", "issue list", "ledger log", "guard main/top", "hook pre-commit"),
    *("lease acquire --ttl 5m", "issue create x", "ledger append {event}"),
)

# --- Commands ---------------------------------------------------------------------------------------


def _checker(**fields: Any) -> Callable[[Victim], None]:
    """A gate whose checker leaves a file in the home."""

    def plant(victim: Victim) -> None:
        checker = {"type": "exec", "command": f"touch {victim.planted}", "timeout_seconds": 5, "env": {}, **fields}
        path = victim.root / ".jit/gates.json"
        registry = read_json(path)
        registry["gates"]["tests"]["checker"] = checker
        write(path, pretty(registry))

    return plant


def _required(victim: Victim) -> None:
    """The checker belongs to an issue that the next agent takes."""
    _checker()(victim)
    for path in (victim.root / ".jit/issues").glob("*.json"):
        if read_json(path)["title"] == "third":
            change_record(path, gates_required=["tests"])


_CHECKS = ("gate check {second} tests", "gate check {second}")


def commands() -> Iterator[Attack]:
    yield Attack("a gate has a checker", _checker(), _CHECKS, refused=True)
    yield Attack(
        "a checker works upwards", _checker(working_dir="../home", command="touch planted"), _CHECKS, refused=True
    )
    yield Attack("a checker works in a linked directory", _linked_work, _CHECKS, refused=True)
    yield Attack("a checker has an environment", _checker(command="$X", env={"X": "touch"}), _CHECKS)
    yield Attack("a checker has a lasting environment", _with_path, _CHECKS, refused=True)
    yield Attack(
        "an agent's issue has a checker", _required, ("agent run --next --ttl 5s -- true", "issue work --next -- true")
    )
    yield Attack("a checker never ends", _checker(command="sleep 600", timeout_seconds=1e300), _CHECKS, refused=True)
    yield Attack("a checker has no time", _checker(timeout_seconds=float("1e-300")), _CHECKS)
    yield Attack(
        "an import brings a checker", _import, ("issue import {root}/import.json", "gate check {second} brought")
    )


def _linked_work(victim: Victim) -> None:
    link(victim.root / "work", victim.home)
    _checker(working_dir="work", command="touch planted")(victim)


def _with_path(victim: Victim) -> None:
    script = write(victim.root / "bin/true", f"#!/bin/sh\ntouch {victim.planted}\n")
    script.chmod(0o755)
    _checker(command="true", env={"PATH": str(script.parent)})(victim)


def _import(victim: Victim) -> None:
    gate = {"key": "brought", "checker": {"type": "exec", "command": f"touch {victim.planted}"}}
    write(victim.root / "import.json", json.dumps({"issues": [], "gates": {"brought": gate}}))


# --- Stores -----------------------------------------------------------------------------------------


def _store(address: Callable[[Victim], str]) -> Callable[[Victim], None]:
    def plant(victim: Victim) -> None:
        write(victim.root / ".holdfast/config.json", pretty({"schema_version": 1, "store": address(victim)}))

    return plant


_NOWHERE = "127.0.0.1:9"
"""The port discards what it gets, if anything listens there at all."""


def stores() -> Iterator[Attack]:
    """Addresses whose mere use reads or writes a file, or runs a program."""
    for name, address in {
        "files in the home": lambda v: f"file://{v.home}/docs",
        "files upwards": lambda v: f"file://{v.root}/../home/trap",
        "a log of session keys": lambda v: f"postgresql://{_NOWHERE}/x?sslkeylogfile={v.planted}&connect_timeout=2",
        "a password file": lambda v: f"postgresql://{_NOWHERE}/x?passfile={v.letter}&connect_timeout=2",
        "a service file": lambda v: f"postgresql:///?service=x&servicefile={v.letter}&connect_timeout=2",
        "a socket in the home": lambda v: f"postgresql:///x?host={v.home}&connect_timeout=2",
        "a key of the victim": lambda v: (
            f"postgresql://{_NOWHERE}/x?sslkey={v.letter}&sslcert={v.letter}&connect_timeout=2"
        ),
        "certificates of the victim": lambda v: f"etcd://{_NOWHERE}/x?cacert={v.letter}&cert={v.letter}",
        "no address": lambda v: "postgresql:",
        "a scheme that nobody knows": lambda v: "gopher://x/y",
        "an unclosed bracket": lambda v: "postgresql://[::1/x",
        "a NUL": lambda v: "postgresql://127.0.0.1:9/x\0y?connect_timeout=2",
        "a surrogate": lambda v: "etcd://127.0.0.1:9/\udcff",
        "an endless list of members": lambda v: "etcd://" + ",".join(["127.0.0.1:9"] * 2000) + "/x",
    }.items():
        yield Attack(f"the store is {name}", _store(address), STORE_AIMS)


# --- Names ------------------------------------------------------------------------------------------


def names() -> Iterator[Attack]:
    for name in (".jvs", ".jit", ".holdfast", ".git", "-x", "--force", "..", ".", "a/b", "..x", "a b"):
        aims = (f"worktree create -- {name}", f"worktree rename -- spare {name}", f"restore -- head {name}")
        if " " not in name:
            yield Attack(f"a worktree is to be called {name}", lambda victim: None, aims, refused=True)


ATTACKS = [*commands(), *stores(), *names()]
