"""Rounds in which many processes race for one stale lock, and storms of kills; both collect violations.

In a round, a stale lock is put in place, a gate opens for all workers, and each tries once and reports the
result. A winner *keeps* the lock until all have answered. So two holders at once cannot be missed, nor can
a lock that another process removed or replaced.
"""

from __future__ import annotations

import json
import os
import random
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import cycle, islice
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from holdfast.clock import ManualClock, format_instant
from holdfast.errors import RepoLocked
from holdfast.fs import calls
from holdfast.locks import identity
from holdfast.locks.file_lock import FileLocker
from holdfast.locks.repo_lock import RepoLock
from tests.locks.workers import Line, Worker, Workers, wait_until

REPO = "repo"
LONG_AGO = 3 * 3600.0
"""Longer than a lock is honoured by default."""


class Held(Protocol):
    """A lock that was granted."""

    lock_id: str

    def unlock(self) -> None: ...


class Lock(Protocol):
    """The implementation under test: ours, or one with a planted bug."""

    def lock(self, repo_id: str) -> Held: ...


MakeLock = Callable[[Path], Lock]


def lock_path(data_dir: Path) -> Path:
    return data_dir / "repos" / REPO / ".lock"


# --- Stale locks of every kind ------------------------------------------------------------------------


class StaleLock(NamedTuple):
    """The content of the lock file before a round; with `age`, the file is that old."""

    kind: str
    content: bytes
    age: float = 0.0

    def put(self, path: Path) -> None:
        """Put it in place, instead of any lock that exists."""
        path.unlink(missing_ok=True)
        path.write_bytes(self.content)
        if self.age:
            then = time.time() - self.age
            os.utime(path, (then, then))


LATE = StaleLock("aged, and its holder unlocks at the same moment", b"")


def stale_locks(data_dir: Path, workers: Workers) -> list[StaleLock]:
    """One stale lock of each kind; the locks of dead processes are left by real ones."""
    dead, by_dead = _killed_holder(data_dir, workers)
    zombie, by_zombie = _killed_holder(data_dir, workers)
    dead.wait()
    wait_until(lambda: (seen := identity.find_process(zombie.pid)) is not None and seen.is_zombie)
    with RepoLock(data_dir).lock(REPO):
        mine = json.loads(lock_path(data_dir).read_bytes())
    host, user, pid, start_time = mine["holder_id"].split(":")
    reused = {**mine, "holder_id": f"{host}:{user}:{pid}:{start_time[:-1]}x"}
    long_ago = format_instant(time.time() - LONG_AGO)
    return [
        StaleLock("of a process that was killed", by_dead),
        StaleLock("of a zombie", by_zombie),
        StaleLock("of a dead pid, by another program", _json(pid=dead.pid, created_at=mine["created_at"])),
        StaleLock("of a pid that was reused", _json(**reused)),
        StaleLock("aged, of a living process", _json(**{**mine, "created_at": long_ago})),
        StaleLock("garbage, old", b"\0garbage", LONG_AGO),
        StaleLock("{}, old", b"{}", LONG_AGO),
        StaleLock("empty, old", b"", LONG_AGO),
        LATE,
    ]


def _json(**record: object) -> bytes:
    return json.dumps(record).encode()


def _killed_holder(data_dir: Path, workers: Workers) -> tuple[Worker, bytes]:
    """A worker that was killed while it held the lock, and the content of the lock that it left."""

    def lock_and_wait(line: Line) -> None:
        RepoLock(data_dir).lock(REPO)
        line.say("held")
        line.wait()

    worker = workers.start(lock_and_wait)
    assert worker.hear() == "held"
    worker.kill()
    content = lock_path(data_dir).read_bytes()
    lock_path(data_dir).unlink()
    return worker, content


# --- Rounds -------------------------------------------------------------------------------------------


class Won(NamedTuple):
    """A worker's report that it holds the lock: its ID, and the inode of the file at the path."""

    lock_id: str
    inode: int


@dataclass
class Tally:
    """The results of the rounds."""

    rounds: int = 0
    violations: list[str] = field(default_factory=list)
    wins: dict[int, int] = field(default_factory=dict)
    kinds: dict[str, int] = field(default_factory=dict)

    def __str__(self) -> str:
        shown = "\n  ".join(self.violations[:10])
        return f"{self.rounds} rounds, {len(self.violations)} violations, wins {self.wins}\n  {shown}"


def race(
    data_dir: Path,
    make_lock: MakeLock,
    *,
    rounds: int,
    count: int = 8,
    kinds: Sequence[str] | None = None,
    first_violation_ends: bool = False,
) -> Tally:
    """Let `count` processes race for one stale lock per round, with each kind of lock in turn."""
    tally = Tally()
    gate, opener = os.pipe()
    try:
        with Workers() as workers:
            locks = [each for each in stale_locks(data_dir, workers) if kinds is None or each.kind in kinds]
            contenders = workers.start_many(count, _contend(data_dir, make_lock, gate))
            for stale in islice(cycle(locks), rounds):
                tally.violations += _round(data_dir, stale, contenders, opener, tally)
                if tally.violations and first_violation_ends:
                    break
    finally:
        os.close(gate)
        os.close(opener)
    return tally


def _round(data_dir: Path, stale: StaleLock, contenders: list[Worker], opener: int, tally: Tally) -> list[str]:
    late = contenders[tally.rounds % len(contenders)] if stale is LATE else None
    tally.rounds += 1
    tally.kinds[stale.kind] = tally.kinds.get(stale.kind, 0) + 1
    if late is None:
        stale.put(lock_path(data_dir))
    else:
        lock_path(data_dir).unlink(missing_ok=True)
        late.ask("hold an aged lock")
    for each in contenders:
        each.say("unlock at the gate" if each is late else "lock at the gate")
    os.write(opener, b"." * len(contenders))
    answers = {each.pid: each.hear() for each in contenders}
    problems = _judge(lock_path(data_dir), answers, no_winner_is_fine=late is not None)
    for each in contenders:
        if isinstance(answers[each.pid], Won):
            tally.wins[each.pid] = tally.wins.get(each.pid, 0) + 1
            each.ask("unlock")
    if not problems and lock_path(data_dir).exists():
        problems.append("the winner has unlocked, but the lock still exists")
    return [f"round {tally.rounds}, a lock {stale.kind}: {problem}" for problem in problems]


def _judge(path: Path, answers: Mapping[int, object], *, no_winner_is_fine: bool) -> list[str]:
    """The violations, judged while every winner still holds the lock."""
    winners = [each for each in answers.values() if isinstance(each, Won)]
    problems = [str(each) for each in answers.values() if isinstance(each, str)]
    if len(winners) > 1:
        problems.append(f"{len(winners)} holders at once")
    if not winners and not (no_winner_is_fine and not path.exists()):
        problems.append("nobody got the lock")
    there = _in_place(path)
    problems += [f"the winner of {won} lost it: the lock is now {there}" for won in winners if won != there]
    return problems


def _in_place(path: Path) -> Won | None:
    try:
        return Won(json.loads(path.read_bytes())["lock_id"], path.stat().st_ino)
    except FileNotFoundError:
        return None


def _contend(data_dir: Path, make_lock: MakeLock, gate: int) -> Callable[[Line], None]:
    def task(line: Line) -> None:
        lock = make_lock(data_dir)
        held: Held | None = None
        while True:
            match line.wait():
                case "lock at the gate":
                    os.read(gate, 1)
                    held, answer = _try(data_dir, lock)
                    line.say(answer)
                case "hold an aged lock":
                    held = _aged(data_dir, make_lock)
                    line.say(None)
                case "unlock at the gate":
                    os.read(gate, 1)
                    line.say(_unlock(held))
                case "unlock":
                    line.say(_unlock(held))

    return task


def _try(data_dir: Path, lock: Lock) -> tuple[Held | None, Won | str | None]:
    try:
        held = lock.lock(REPO)
    except RepoLocked:
        return None, None
    except Exception as error:
        return None, f"a worker got neither the lock nor RepoLocked, but {error!r}"
    with suppress(FileNotFoundError):
        return held, Won(held.lock_id, lock_path(data_dir).stat().st_ino)
    return held, Won(held.lock_id, 0)


def _unlock(held: Held | None) -> str | None:
    try:
        if held is not None:
            held.unlock()
    except Exception as error:
        return f"unlocking raised {error!r}"
    return None


def _aged(data_dir: Path, make_lock: MakeLock) -> Held:
    """A lock that this worker took long ago."""
    lock = make_lock(data_dir)
    if isinstance(lock, RepoLock):
        lock._clock = ManualClock(wall=time.time() - LONG_AGO)
    return lock.lock(REPO)


# --- Delays -------------------------------------------------------------------------------------------


def delayed(data_dir: Path) -> RepoLock:
    """Our lock in a worker whose file system calls are delayed at random."""
    delay_calls()
    return RepoLock(data_dir)


def delay_calls(names: Sequence[str] = ("open", "link", "unlink", "rename"), *, most: float = 0.002) -> None:
    """In a worker: delay some of these calls by up to `most` seconds."""
    for name in names:
        setattr(calls, name, _with_delay(getattr(calls, name), most))


def _with_delay(call: Callable[..., Any], most: float) -> Callable[..., Any]:
    def delayed_call(*arguments: Any, **options: Any) -> Any:
        pause(most)
        return call(*arguments, **options)

    delayed_call.delayed = True  # type: ignore[attr-defined]
    return call if hasattr(call, "delayed") else delayed_call


def pause(most: float = 0.002) -> None:
    """Let other processes run, half of the time."""
    if random.random() < 0.5:
        time.sleep(random.random() * most)


# --- A storm of kills ---------------------------------------------------------------------------------


@dataclass
class Storm:
    """The results of a storm."""

    kills: int = 0
    killed_while_holding: int = 0
    acquired: int = 0
    violations: list[str] = field(default_factory=list)

    def is_over(self, kills: int) -> bool:
        """Whether `kills` workers were killed, a twentieth of that number while they held the lock."""
        return self.kills >= kills and self.killed_while_holding >= kills // 20


def storm(
    data_dir: Path, make_lock: MakeLock, *, kills: int, count: int = 8, first_violation_ends: bool = False
) -> Storm:
    """Kill workers at random while they take, hold and release one lock, and collect violations.

    The witness is a file lock, which the kernel releases when its holder dies: each holder of the
    repository's lock takes it too, and must find it free.
    """
    seen = Storm()
    diary = data_dir / "diary"
    diary.touch()
    with Workers() as workers:
        running = workers.start_many(count, _lock_and_unlock(data_dir, make_lock))
        while not seen.is_over(kills) and not (first_violation_ends and seen.violations):
            _wait_for_growth(diary)  # the others make progress, whatever the last victim left
            time.sleep(random.random() * 0.004)
            victim = running.pop(random.randrange(count))
            victim.kill()
            victim.wait()
            seen.kills += 1
            seen.killed_while_holding += _is_held_by(data_dir, victim.pid)
            seen.violations = [each for each in diary.read_text().splitlines() if each != "acquired"]
            running.append(workers.start(_lock_and_unlock(data_dir, make_lock)))
        _wait_for_growth(diary)
    entries = diary.read_text().splitlines()
    seen.violations = [each for each in entries if each != "acquired"]
    seen.acquired = len(entries) - len(seen.violations)
    return seen


def _wait_for_growth(file: Path) -> None:
    size = file.stat().st_size
    wait_until(lambda: file.stat().st_size > size)


def _is_held_by(data_dir: Path, pid: int) -> bool:
    state = RepoLock(data_dir).state(REPO)
    return state is not None and state.info is not None and state.info.pid == pid


def _lock_and_unlock(data_dir: Path, make_lock: MakeLock) -> Callable[[Line], None]:
    def task(line: Line) -> None:
        lock, witness = make_lock(data_dir), FileLocker()
        diary = os.open(data_dir / "diary", os.O_WRONLY | os.O_APPEND)
        while not line.has_news():
            try:
                held = lock.lock(REPO)
                guard = witness.try_lock_exclusive(data_dir / "witness")
                os.write(diary, b"acquired\n" if guard else b"two holders at once\n")
                pause(0.004)
                if guard:
                    guard.release()
                held.unlock()
            except RepoLocked:
                pass
            except Exception as error:
                os.write(diary, f"{error!r}\n".encode())
            pause(0.001)

    return task
