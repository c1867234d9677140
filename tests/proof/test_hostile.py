"""The harnesses for hostile repositories find planted faults: writes outside, leaks, hangs, and unknown errors."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from holdfast.errors import Corrupt
from proof.hostile.campaign import Blueprint, Campaign, Case
from proof.hostile.commands import CommandLine
from proof.hostile.damage import KINDS, clear, mutate_directory, mutate_file
from proof.hostile.decoders import all_decoders
from proof.hostile.fuzz import fuzz
from proof.hostile.inputs import hostile_inputs
from proof.hostile.record_decoders import Decoder
from proof.hostile.runner import HUNG, Job, Outcome, execute_function
from proof.hostile.swaps import Arena, Scenario, Tally, exchange, raced, swept
from proof.hostile.victim import MARK, Victim, changes, leaks, make_victim, recorded, renew_home

if sys.platform != "linux":
    pytest.skip("forks with limits need the calls of Linux", allow_module_level=True)


@pytest.fixture
def victim(scratch: Path) -> Victim:
    """A victim with a repository in which nothing is real but the names."""
    made = make_victim(scratch / "base")
    for path in (".jvs/plans/p.json", ".jvs/pins/p.json", "main/top"):
        (made.root / path).parent.mkdir(parents=True, exist_ok=True)
        (made.root / path).write_text('{"state":"proposed"}')
    for title in ("first", "second"):
        issue = made.root / f".jit/issues/{title}.json"
        issue.parent.mkdir(parents=True, exist_ok=True)
        issue.write_text(json.dumps({"title": title}))
    return made


def ending(victim: Victim, work: Callable[[], int], *, limit: float = 5.0) -> Outcome:
    return execute_function(Job((), str(victim.base), victim.environment(), limit=limit), work)


# --- Sentinels --------------------------------------------------------------------------------------


def test_every_planted_change_of_the_home_is_noticed(victim: Victim) -> None:
    home = victim.home
    acts: dict[str, Callable[[], object]] = {
        "created": lambda: (home / "new").write_text("x"),
        "removed": (home / "docs/letter").unlink,
        "rewritten with the same size and time": lambda: _rewrite(home / "docs/letter"),
        "cut": lambda: os.truncate(home / ".bashrc", 3),
        "another mode": lambda: (home / "docs/letter").chmod(0o777),
        "made and removed again": lambda: _make_and_remove(home / "docs/x"),
        "linked from outside": lambda: os.link(home / "docs/letter", victim.root / "linked"),
        "a link that leads elsewhere": lambda: _link_elsewhere(home / "docs/link"),
        "a directory removed": lambda: shutil.rmtree(home / "docs/deep"),
    }
    for name, act in acts.items():
        before = recorded(victim)
        act()
        assert changes(before, recorded(victim)), name
        renew_home(victim)


def _link_elsewhere(path: Path) -> None:
    path.unlink()
    path.symlink_to("elsewhere")


def _make_and_remove(path: Path) -> None:
    path.write_text("")
    path.unlink()


def _rewrite(path: Path) -> None:
    status = path.stat()
    path.write_text("y" * status.st_size)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def test_reading_the_home_is_no_change_but_a_copy_of_it_is_found(victim: Victim) -> None:
    before = recorded(victim)
    content = victim.letter.read_text()
    assert not changes(before, recorded(victim))
    assert not leaks(victim)

    (victim.root / "main/copied").write_text(content)
    assert leaks(victim) == ["read into repository/main/copied"]
    (victim.root / "main/copied").unlink()
    (victim.root / "main/linked").symlink_to(victim.letter)
    assert not leaks(victim), "a link that nobody followed is no leak"


# --- Commands ---------------------------------------------------------------------------------------


def waiting(child: int) -> int:
    """Wait for a child for ever."""
    os.waitpid(child, 0)
    return 0


def in_a_child(work: Callable[[], object]) -> int:
    """The process id of a child that does this again and again."""
    child = os.fork()
    while child == 0:
        work()
    return child


def reading_a_fifo() -> int:
    os.mkfifo("fifo")
    return len(Path("fifo").read_bytes())


HANGS: dict[str, Callable[[], int]] = {
    "asleep": lambda: waiting(in_a_child(lambda: time.sleep(60))),
    "in an open": reading_a_fifo,
    "busy": lambda: in_a_child(lambda: None) and waiting(in_a_child(lambda: None)),
    "asking again and again": lambda: waiting(in_a_child(lambda: time.sleep(0.01))),
}


@pytest.mark.parametrize("hang", HANGS)
def test_a_planted_hang_is_found_says_where_and_its_children_are_ended(hang: str, victim: Victim) -> None:
    outcome = ending(victim, HANGS[hang], limit=0.2)
    assert outcome.status is None
    assert outcome.problem == HUNG
    assert "test_hostile.py" in outcome.err


def test_a_command_that_a_busy_machine_keeps_waiting_does_not_hang(victim: Victim) -> None:
    """It cannot run for many times its limit, as if other processes had the processors all the time."""

    limit = 0.5  # to be forked takes a tenth on a busy machine

    def kept_waiting() -> int:
        command = os.getpid()
        if os.fork() == 0:
            os.setsid()
            time.sleep(4 * limit)  # the busy time itself, not a wait for something
            os.kill(command, signal.SIGCONT)
            os._exit(0)
        os.kill(command, signal.SIGSTOP)
        return 0

    outcome = ending(victim, kept_waiting, limit=limit)
    assert outcome.status == 0, outcome


def test_a_planted_error_an_endless_read_and_a_strange_status_are_found(victim: Victim) -> None:
    def raising() -> int:
        raise KeyError("planted")

    def endless() -> int:
        return len(b"".join(Path("/dev/zero").open("rb").read(1 << 26) for _ in range(20)))

    def reported() -> int:
        sys.stderr.write("Error: KeyError: 'x'\n\nCode: E_UNEXPECTED\n")
        return 1

    def refused() -> int:
        sys.stderr.write("Error: no\n\nCode: E_REFUSED\n")
        return 7

    def dying() -> int:
        os.kill(os.getpid(), signal.SIGKILL)
        return 0

    assert "KeyError" in ending(victim, raising).problem
    assert "MemoryError" in ending(victim, endless).problem
    assert ending(victim, reported).problem.startswith("unexpected")
    assert ending(victim, lambda: 99).problem
    assert ending(victim, dying).problem == "it died of signal 9"
    assert ending(victim, refused).problem == ""
    assert ending(victim, refused).code == "E_REFUSED"


def campaign_with(victim: Victim, work: Callable[[Victim], int], *, limit: float = 60.0) -> list[str]:
    """The problems that a campaign finds in a program that does this; it hangs after `limit` seconds."""

    def run(job: Job, prepare: Callable[[], object] | None = None) -> Outcome:
        job = job._replace(limit=limit)
        return execute_function(job, lambda: work(campaign.victim), prepare=prepare)

    with Campaign(victim, run=run) as campaign:
        case = Case(1, "nothing", lambda victim: None, [CommandLine(("who",)), CommandLine(("info",))])
        found = campaign.try_case(case)
        assert campaign.cases == 2
        again = campaign.try_case(Case(2, "nothing", lambda victim: None, [CommandLine(("who",))]))
    return [*(each["problem"] for each in found), *(each["problem"] for each in again)]


def test_a_campaign_finds_planted_faults_and_nothing_in_a_sound_program(victim: Victim) -> None:
    def outside(victim: Victim) -> int:
        victim.planted.write_text("x")
        return 0

    def inside(victim: Victim) -> int:
        (victim.root / "main/new").write_text("x")
        return 0

    def reading(victim: Victim) -> int:
        (victim.root / "main/new").write_text(victim.letter.read_text())
        return 0

    def printing(victim: Victim) -> int:
        sys.stdout.write(victim.letter.read_text())
        return 0

    def hanging(victim: Victim) -> int:
        time.sleep(60)
        return 0

    assert campaign_with(victim, inside) == []
    assert campaign_with(victim, outside).count("created home/planted") == 3, "the home is renewed after each"
    assert "read into repository/main/new" in campaign_with(victim, reading)
    assert "it printed the home" in campaign_with(victim, printing)
    assert campaign_with(victim, hanging, limit=0.2) == [HUNG] * 3


def test_a_repository_is_rebuilt_as_it_was(victim: Victim, scratch: Path) -> None:
    (victim.root / "main/link").symlink_to("top")
    blueprint = Blueprint(victim)
    (scratch / "again").mkdir()
    blueprint.build(scratch / "again/repository")

    again = Blueprint(Victim(scratch / "again"))
    kept, rebuilt = ([each for each in made.entries if each.path != "main/link"] for made in (blueprint, again))
    assert rebuilt == kept
    assert os.readlink(scratch / "again/repository/main/link") == "top"


def test_every_kind_of_damage_and_many_mutations_can_be_done(victim: Victim) -> None:
    chance = random.Random(1)
    path = victim.root / "main/top"
    for name, damage in KINDS.items():
        damage(str(path), victim, chance)
        assert os.path.lexists(path), name
    for _ in range(200):
        for place, mutate in ((path, mutate_file), (victim.root / ".jvs/plans", mutate_directory)):
            place.parent.mkdir(exist_ok=True)
            if place.is_symlink() or not place.exists():  # an earlier mutation
                clear(str(place))
                place.mkdir() if mutate is mutate_directory else place.write_text('{"a": [1, "x"]}')
            mutate(str(place), victim, chance)


# --- Decoders ---------------------------------------------------------------------------------------


def planted(decode: Callable[[bytes], object]) -> Decoder:
    return Decoder("planted", decode, (b'{"name":"x","at":"2024-05-01T10:00:00Z","list":[1,2]}',))


def test_a_planted_decoder_that_raises_something_else_than_a_failure_is_found() -> None:
    def careless(content: bytes) -> object:
        return json.loads(content)["name"].upper()

    found = fuzz([planted(careless)], 2000, seed=1)
    assert {"KeyError", "AttributeError", "TypeError", "RecursionError"} <= {each.error for each in found}
    assert all(each.times >= 1 for each in found)


def test_a_sound_decoder_passes() -> None:
    def sound(content: bytes) -> object:
        raise Corrupt("no")

    assert fuzz([planted(sound)], 2000, seed=1) == []


def _busy(content: bytes) -> object:
    while True:
        pass


def _asleep(content: bytes) -> object:
    time.sleep(600)
    return content


@pytest.mark.parametrize("slow", [_busy, _asleep])
def test_a_planted_slow_decoder_is_found(slow: Callable[[bytes], object], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("proof.hostile.fuzz.SLOW", 0.1)
    monkeypatch.setattr("proof.hostile.fuzz.STUCK", 1000 if slow is _busy else 2)

    assert [each.error for each in fuzz([planted(slow)], 2, seed=1)] == ["TooSlow"]


def test_hostile_inputs_are_the_same_for_a_seed_and_reach_every_decoder(scratch: Path) -> None:
    for each in all_decoders(scratch):
        once, again = (hostile_inputs(each.samples, random.Random(7)) for _ in range(2))
        assert [next(once) for _ in range(50)] == [next(again) for _ in range(50)]


# --- Swaps ------------------------------------------------------------------------------------------


def careless_arena(victim: Victim) -> Arena:
    scenario = Scenario("planted", "main", "docs", ("lock", "status", "main/top"))
    return Arena(victim, Blueprint(victim), scenario, {"plan": "p"})


def test_an_exchange_puts_a_link_in_place_of_a_directory(victim: Victim) -> None:
    arena = careless_arena(victim)
    exchange(arena.directory, arena.decoy)
    assert arena.directory.is_symlink()
    exchange(arena.directory, arena.decoy)
    assert arena.directory.is_dir()


@pytest.mark.long
@pytest.mark.parametrize("way", [lambda arena: swept(arena, range(1, 3)), lambda arena: raced(arena, 5)])
def test_a_planted_write_through_a_swapped_directory_is_found(
    way: Callable[[Arena], Tally], victim: Victim, monkeypatch: pytest.MonkeyPatch
) -> None:
    def careless() -> int:
        """Checks that the directory is no link, and then uses its path."""
        from holdfast.fs import calls

        end = time.monotonic() + 1
        while time.monotonic() < end:
            if calls.stat("main", follow_symlinks=False).st_mode & 0o170000 == 0o040000:
                calls.close(calls.open("main/written", os.O_CREAT | os.O_WRONLY))
                if (victim.home / "docs/written").exists():
                    return 0
        return 0

    monkeypatch.setattr("holdfast.__main__.main", careless)
    tally = way(careless_arena(victim))
    assert tally.swapped
    assert any("home/docs/written" in each for each in tally.escapes), tally


def test_the_mark_is_in_every_file_that_an_attacker_could_want(victim: Victim) -> None:
    files = [path for path in victim.home.rglob("*") if path.is_file() and not path.is_symlink()]
    assert len(files) > 50
    assert all(MARK in path.read_text() for path in files)
