"""Damage to the files of a repository, of each kind that a disk, a person or an attacker does."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import stat
import sys
from collections.abc import Callable
from typing import Any

from proof.hostile.inputs import HOSTILE, mutated
from proof.hostile.victim import TRAPPED, Victim

HUGE = 3 << 30
LARGE = 64 << 20
"""More than a command may have in memory; a file with holes takes no space."""

Damage = Callable[[str, Victim, random.Random], object]


def clear(path: str) -> None:
    """Remove whatever is at a path."""
    with contextlib.suppress(FileNotFoundError):
        if stat.S_ISDIR(os.lstat(path).st_mode):
            shutil.rmtree(path, ignore_errors=True)
        else:
            os.unlink(path)


def write(path: str, content: bytes) -> None:
    clear(path)
    with open(path, "wb") as file:
        file.write(content)


def content_of(path: str) -> bytes:
    """The content of a regular file; empty for anything else."""
    with contextlib.suppress(OSError):
        if stat.S_ISREG(os.lstat(path).st_mode):
            with open(path, "rb") as file:
                return file.read(1 << 20)
    return b""


def linked(path: str, target: str | os.PathLike[str]) -> None:
    clear(path)
    os.symlink(target, path)


def fifo(path: str) -> None:
    if sys.platform == "win32":
        raise NotImplementedError
    clear(path)
    os.mkfifo(path)


def huge(path: str, victim: Victim) -> None:
    """Enlarge a file beyond all limits. A file of the user has none, and reading it takes its time."""
    write(path, content_of(path))
    is_users = (
        path.startswith((f"{victim.repository}/main", f"{victim.repository}/worktrees/")) and "/.git/" not in path
    )
    os.truncate(path, LARGE if is_users else HUGE)


def _directory(path: str) -> None:
    clear(path)
    os.mkdir(path)
    write(f"{path}/inside", b"x")


def _cut(path: str, chance: random.Random) -> None:
    content = content_of(path)
    write(path, content[: chance.randrange(len(content) + 1)])


def _other_type(path: str) -> None:
    """Another type of JSON: a list where an object was."""
    content = content_of(path)
    write(path, b'[1,"x",null]\n' if content.lstrip().startswith(b"{") else b'{"x":[]}\n')


KINDS: dict[str, Damage] = {
    "empty": lambda path, victim, chance: write(path, b""),
    "cut": lambda path, victim, chance: _cut(path, chance),
    "garbage": lambda path, victim, chance: write(path, chance.randbytes(200)),
    "another type": lambda path, victim, chance: _other_type(path),
    "deep": lambda path, victim, chance: write(path, b'{"a":' * 20_000 + b"1" + b"}" * 20_000),
    "a directory": lambda path, victim, chance: _directory(path),
    "a link": lambda path, victim, chance: linked(path, victim.letter),
    "a loop": lambda path, victim, chance: linked(path, os.path.basename(path)),
    "a fifo": lambda path, victim, chance: fifo(path),
    "huge": lambda path, victim, chance: huge(path, victim),
    "unreadable": lambda path, victim, chance: os.chmod(path, 0),
}
"""The kinds of damage to one file. All of them can be done by the owner of the file."""


# --- Random mutations -------------------------------------------------------------------------------


def hostile_texts(victim: Victim) -> list[str]:
    """Texts that lead out of the repository, or that no name or time may be."""
    return [
        *(str(victim.home / "docs"), str(victim.planted), str(victim.letter), str(victim.trap / TRAPPED)),
        *(
            f"{victim.upwards}../../../home/docs",
            f"{victim.upwards}../../../home/trap/{TRAPPED}",
            f"{victim.upwards}../../home/planted",
            "..",
            ".",
            "",
            "/",
            "a/b",
            "-rf",
        ),
        *("a\0b", "a\ud800b", "x" * 3000, "\x1b[2J", "main", "side", "spare", "head", TRAPPED, "not a time"),
        *("9999-12-31T23:59:59-23:59", "2999-01-01T00:00:00Z", "$(touch pwned)", f"touch {victim.planted}"),
    ]


def _hostile_value(victim: Victim, chance: random.Random) -> Any:
    if chance.random() < 0.6:
        return chance.choice(hostile_texts(victim))
    return chance.choice(
        [None, True, 0, -1, 1e300, 10**30, 10**400, [], {}, [[["x"]]], {"": None}, ["x"] * 1000, [{"a": {"b": []}}]]
    )


def _change_value(value: Any, victim: Victim, chance: random.Random) -> Any:
    """Replace one value in a JSON value, at any depth."""
    if isinstance(value, dict) and value and chance.random() < 0.9:
        name = chance.choice(list(value))
        if chance.random() < 0.1:
            return {each: inner for each, inner in value.items() if each != name}
        return {**value, name: _change_value(value[name], victim, chance)}
    if isinstance(value, list) and value and chance.random() < 0.9:
        at = chance.randrange(len(value))
        return [*value[:at], _change_value(value[at], victim, chance), *value[at + 1 :]]
    return _hostile_value(victim, chance)


def _change_json(path: str, victim: Victim, chance: random.Random) -> None:
    """Change a value of a JSON file, or of one line of a file of lines."""
    lines = content_of(path).splitlines(keepends=True)
    whole = b"".join(lines)
    try:
        changed = _change_value(json.loads(whole), victim, chance)
        write(path, json.dumps(changed, indent=chance.choice((None, 2))).encode("utf-8", "surrogatepass"))
    except (ValueError, RecursionError):
        at = chance.randrange(len(lines)) if lines else 0
        try:
            changed = _change_value(json.loads(lines[at]), victim, chance)
        except (ValueError, IndexError, RecursionError):
            write(path, mutated(whole or b"{}", [whole or b"{}"], chance))
        else:
            lines[at] = json.dumps(changed, separators=(",", ":")).encode() + b"\n"
            write(path, b"".join(lines))


def mutate_file(path: str, victim: Victim, chance: random.Random) -> None:
    """Do something to one file."""
    kind = chance.random()
    if kind < 0.45:
        _change_json(path, victim, chance)
    elif kind < 0.6:
        content = content_of(path) or b"\0"
        write(path, mutated(content, [content], chance))
    elif kind < 0.85:
        KINDS[chance.choice(list(KINDS))](path, victim, chance)
    elif kind < 0.95:
        targets: list[str | os.PathLike[str]] = [
            victim.planted,
            victim.letter,
            victim.trap,
            victim.trap / TRAPPED,
            "/dev/zero",
            "/proc/self/mem",
            "..",
        ]
        linked(path, chance.choice(targets))
    else:
        clear(path)


def mutate_directory(path: str, victim: Victim, chance: random.Random) -> None:
    """Do something to one directory."""
    kind = chance.random()
    if kind < 0.4:
        targets: list[str | os.PathLike[str]] = [
            victim.trap,
            victim.home,
            victim.trap / TRAPPED,
            victim.home / "docs/empty",
            "..",
            ".",
            "/nowhere",
        ]
        linked(path, chance.choice(targets))
    elif kind < 0.75:
        _add_entry(path, victim, chance)
    elif kind < 0.85:
        clear(path)
        (fifo if chance.random() < 0.5 else lambda each: write(each, b"{}"))(path)
    elif kind < 0.95:
        os.chmod(path, chance.choice((0, 0o500, 0o300, 0o777)))
    else:
        clear(path)


def _add_entry(path: str, victim: Victim, chance: random.Random) -> None:
    """Add a copy of an entry, or a link, under a strange name."""
    names = ["-rf", "a b", "\n", "\udcff\udcfe", "x" * 250, f"{TRAPPED}.json", TRAPPED, f"{TRAPPED}.swept", "main.json"]
    names += ["new.json", "event-000003.json", "event-999999999999999999999.json", ".x-0123456789ab.tmp", "$(id).json"]
    new = f"{path}/{chance.choice(names)}"
    with contextlib.suppress(OSError):
        kind = chance.random()
        if kind < 0.5:
            near = [f"{path}/{each}" for each in sorted(os.listdir(path))]
            files = [each for each in near if os.path.isfile(each) and not os.path.islink(each)]
            write(new, content_of(chance.choice(files)) if files else b"{}")
            _change_json(new, victim, chance)
        elif kind < 0.75:
            linked(new, chance.choice([victim.trap, victim.letter, victim.planted, victim.home / "docs"]))
        elif kind < 0.9:
            os.mkdir(new)
            linked(f"{new}/payload", victim.home / "docs")
        else:
            write(new, chance.choice(HOSTILE))
