"""Snapshots and restores of directories, compared with the usual programs.

Every figure includes one sync of the filesystem. All contenders perform a phase in turn, on the same source,
before the next phase begins; the source is changed once between them. Peers that take several times as long
as a copy are measured in the first round only, and compared with our figure of that round. Peers that are not
on the PATH are named and left out.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from statistics import median
from time import sleep
from typing import NamedTuple

from bench.archivers import CONTENDERS, OURS, PHASES, Contender, Holdfast, call, present
from bench.clones import Amount, measure_clones
from bench.measure import Ratio, interleave, ratio, rotated
from bench.report import Column, Report, Table, Target, Value, at_most
from bench.report import number as written
from bench.timing import Cost, say, timed
from holdfast.trees.engines import Engine, choose_engine
from holdfast.trees.retained_dirs import tree_bytes
from holdfast.trees.walker import remove_tree

MIB = 1 << 20
SETTLED = 0.1  # so that no write and snapshot share a tick of the clock
MANY = 1_000_000
SPACE = 20 << 30


class Size(NamedTuple):
    """How much to measure."""

    rounds: int = 3
    files: int = 100_000
    directories: int = 5_000
    packages: int = 2_000
    big: int = 2048 * MIB
    big_rounds: int = 12
    history: int = 50
    clones: Amount = Amount()


FULL = Size()
QUICK = Size(
    rounds=1,
    files=2_000,
    directories=100,
    packages=40,
    big=64 * MIB,
    big_rounds=2,
    history=6,
    clones=Amount(64 * MIB, 500),
)

LIMITS: dict[str, dict[str, float]] = {
    "first": {"cp -a": 1.7},
    "unchanged": {"cp -al": 1.0, "rsync": 0.25},
    "changed": {"git": 1.0, "rsync": 0.3, "restic": 0.2},
    "restore": {"cp -a": 1.5},
}
"""The most that our time may be, as a multiple of a peer's, by phase."""


# --- Sources ----------------------------------------------------------------------------------------


def small_files(top: Path, size: Size) -> None:
    """Many small files, as in a large repository."""
    each = size.files // size.directories
    for number in range(size.directories):
        directory = top / f"g{number // 100:03d}" / f"d{number:05d}"
        directory.mkdir(parents=True)
        for name in range(each):
            (directory / f"file{name:03d}.txt").write_bytes(os.urandom(512) + b"%08d%08d" % (number, name) * 32)


def packages(top: Path, size: Size) -> None:
    """Like a virtual environment: packages with some large and many small files, and links."""
    for number in range(size.packages):
        directory = top / "lib" / f"package{number:04d}" / "sub"
        directory.mkdir(parents=True)
        for name in range(14):
            length = 180_000 if name == 0 else 700 * (name + 1)
            (directory.parent / f"module{name}.py").write_bytes(os.urandom(length // 2) + bytes(length // 2))
        (directory / "__init__.py").touch()
        (directory / "link").symlink_to("../module1.py")


def change_one_percent(top: Path, token: int) -> None:
    """Overwrite every hundredth file."""
    every = 0
    for here, directories, names in os.walk(top):
        directories.sort()
        for name in sorted(names):
            path = Path(here, name)
            every += 1
            if every % 100 == 50 and not path.is_symlink():
                path.write_bytes(b"changed %d " % token + os.urandom(600))


# --- Measuring --------------------------------------------------------------------------------------


Series = dict[str, dict[str, list[Cost]]]


def measure_phases(
    where: str, make: Callable[[Path], None], rounds: int, report: Report, rubbish: list[Path]
) -> Series:
    """All phases of all contenders, round by round; seconds by phase and contender."""
    series: Series = {phase: {} for phase in PHASES}
    for round_number in range(rounds):
        with scratch(rubbish) as top:
            source = top / "source"
            make(source)
            sleep(SETTLED)
            contenders = {
                name: kind(source, top / f"place-{index}")
                for index, (name, kind) in enumerate(present(Report(), where).items())
                if kind.every_round or round_number == 0
            }
            for phase in PHASES:
                say(f"{where}: round {round_number + 1} of {rounds}, {phase}")
                if phase == "changed":
                    change_one_percent(source, round_number)
                    sleep(SETTLED)
                actions = {name: _action(each, phase, top) for name, each in contenders.items() if phase in each.phases}
                ordered = {name: actions[name] for name in rotated(list(actions), round_number)}
                results = interleave(ordered, 1)
                report.note_failures(f"{where}, {phase}", results.failures)
                for name, costs in results.series.items():
                    series[phase].setdefault(name, []).extend(costs)
    return series


def _action(contender: Contender, phase: str, top: Path) -> Callable[[], Cost]:
    def restore() -> None:
        contender.restore(contender.place / "restored")

    return lambda: timed(restore if phase == "restore" else contender.take, top)


def judge(where: str, series: Series, report: Report) -> None:
    """Add two tables, and the targets, which are about wall time."""
    report.tables.append(_table(f"{where}; medians, one sync included", series, lambda cost: cost.wall))
    report.tables.append(_table(f"{where}; the same in CPU time", series, lambda cost: cost.cpu))
    for phase, peers in LIMITS.items():
        for peer, limit in peers.items():
            found = _ours_to(peer, series[phase], lambda cost: cost.wall)
            text = f"{where}, {phase}: at most {limit:g} times {peer}"
            report.targets.append(at_most(limit, text, found and found.median))


def _table(title: str, series: Series, measure: Callable[[Cost], float]) -> Table:
    columns = [column for phase in PHASES for column in (Column(f"{phase} s", written(".2f")), Column("ours /"))]
    table = Table(title, columns)
    for name in CONTENDERS:
        cells: list[Value] = []
        for phase in PHASES:
            costs = series[phase].get(name)
            cells.append(median(map(measure, costs)) if costs else None)
            cells.append(_ours_to(name, series[phase], measure))
        if any(cell is not None for cell in cells):
            table.rows[name] = cells
    return table


def _ours_to(peer: str, series: Mapping[str, list[Cost]], measure: Callable[[Cost], float]) -> Ratio | None:
    """Our measure as a multiple of the peer's; None if one of the two failed in a round."""
    theirs, ours = [*map(measure, series.get(peer, []))], [*map(measure, series.get(OURS, []))]
    if not CONTENDERS[peer].every_round:
        ours = ours[:1]
    return ratio(ours, theirs) if ours and len(ours) == len(theirs) else None


def measure_big_file(size: int, rounds: int, report: Report) -> None:
    """One big file: changed, it is read once; unchanged, not at all.

    Each copy is removed before the next one begins. The first use of a page of memory costs several times
    the measured time, at random. So the minimum of all rounds is compared; the table also has medians.
    """
    where = f"one file of {size // MIB} MiB"
    first: dict[str, list[float]] = {OURS: [], "cp": []}
    again: list[float] = []
    with scratch() as top:
        source = top / "source"
        source.mkdir()
        with (source / "big").open("wb") as file:
            for _ in range(size // MIB):
                file.write(os.urandom(MIB))
        sleep(SETTLED)
        call("cp", "-a", source, top / "warm")
        remove_tree(top / "warm")
        for round_number in range(rounds):
            say(f"{where}: round {round_number + 1} of {rounds}")
            for name in [OURS, "cp"][:: 1 if round_number % 2 else -1]:
                place = top / f"{name}-{round_number}"
                if name == OURS:
                    ours = Holdfast(source, place)
                    first[name].append(timed(ours.take, top).wall)
                    again.append(timed(ours.take, top).wall)
                else:
                    first[name].append(timed(partial(call, "cp", "-a", source, place), top).wall)
                remove_tree(place)
    columns = [Column("least s", written(".3f")), Column("median s", written(".3f")), Column("/ cp")]
    table = Table(f"{where}; one sync included", columns)
    for name, seconds in {**first, f"{OURS}, unchanged": again}.items():
        table.rows[name] = [min(seconds), median(seconds), ratio(seconds, first["cp"])]
    report.tables.append(table)
    changed, unchanged = (min(each) / min(first["cp"]) for each in (first[OURS], again))
    report.targets.append(at_most(1.3, f"{where}, changed: at most 1.3 times cp", changed))
    report.targets.append(at_most(0.1, f"{where}, unchanged: not read (at most 0.1 times cp)", unchanged))


MEMORY = """
import json, sys, threading
from pathlib import Path
from holdfast.trees import scan_worker
from holdfast.trees.capture import capture
from holdfast.trees.engines import Engine

scan_worker._is_busy = lambda: False  # measure with the worker process, even if the disk is still busy

def peak(process):  # since its start; the resource module includes the program before exec
    for line in Path(f"/proc/{process}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return 0

def watch():
    while not done.wait(0.02):
        for child in children.read_text().split():
            try:
                peaks[1] = max(peaks[1], peak(child))
            except OSError:
                pass

source, place = map(Path, sys.argv[1:])
known = {"cache": place / "cache", "engine": Engine.LINKED, "quiesced": True}
peaks, done = [0, 0], threading.Event()
children = Path(f"/proc/self/task/{threading.main_thread().native_id}/children")
watching = threading.Thread(target=watch)
watching.start()
capture(source, place / "1", **known)
capture(source, place / "2", base=place / "1", **known)
done.set()
watching.join()
peaks[0] = peak("self")
print(json.dumps(peaks))
"""


def measure_memory(size: Size, report: Report, rubbish: list[Path]) -> None:
    """Peak memory of a first and a second capture, extrapolated to a million files."""
    say("memory")
    if sys.platform != "linux":
        report.notes.append("memory was NOT MEASURED: only Linux reports the peak of a process since its start")
        report.targets.append(at_most(600, "peak memory of a million files, by slope", None, "MiB"))
        return
    found = []
    for files in (size.files // 10, size.files):
        with scratch(rubbish) as top:
            part = size._replace(files=files, directories=max(1, size.directories * files // size.files))
            small_files(top / "source", part)
            (top / "place").mkdir()
            command = [sys.executable, "-c", MEMORY, str(top / "source"), str(top / "place")]
            said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
            found.append((files, *map(int, json.loads(said))))
    (few, little, _), (many, much, worker) = found
    million = much + (much - little) / (many - few) * (MANY - many) + worker
    table = Table("peak memory of captures", [Column("MiB", written(".0f"))])
    table.rows |= {
        f"{few} files": [little / MIB],
        f"{many} files": [much / MIB],
        "its worker process": [worker / MIB],
        "1 000 000, by slope": [million / MIB],
    }
    report.tables.append(table)
    report.targets.append(at_most(600, "peak memory of a million files, by slope", million / MIB, "MiB"))


def measure_history(size: Size, report: Report, rubbish: list[Path]) -> None:
    """Disk usage of a history: at most twice the changed files and the directories."""
    say("history")
    with scratch(rubbish) as top:
        source, place = top / "source", top / "place"
        small_files(source, size)
        place.mkdir()
        ours = Holdfast(source, place / "ours")
        ours.take()
        first = tree_bytes([ours.last()])
        seconds = []
        for token in range(size.history):
            change_one_percent(source, token)
            sleep(SETTLED)
            seconds.append(timed(ours.take, top).wall)
        everything = tree_bytes([ours.place / str(each + 1) for each in range(ours.count)])
        changed = size.files // 100 * 4096
        directories = tree_bytes([source]) - size.files * 4096
        per_state = (everything - first) / size.history
    report.targets.append(_storage(per_state, changed + directories))
    third = max(1, size.history // 3)
    grown = median(seconds[-third:]) / median(seconds[:third])
    text = f"snapshot {size.history + 1} of a history, 1 % changed: at most 1.3 times the first ones"
    report.targets.append(at_most(1.3, text, grown))


def measure_growth(size: Size, report: Report, rubbish: list[Path]) -> None:
    """The cost per file of an unchanged snapshot, compared with that of a tree ten times smaller."""
    say("growth")
    costs = []
    for files in (size.files // 10, size.files):
        with scratch(rubbish) as top:
            part = size._replace(files=files, directories=max(1, size.directories * files // size.files))
            small_files(top / "source", part)
            sleep(SETTLED)
            ours = Holdfast(top / "source", top / "ours")
            ours.take()
            costs.append(min(timed(ours.take, top).wall for _ in range(5)) / files)
    text = f"a file among {size.files}, unchanged: at most 1.3 times one among {size.files // 10}"
    report.targets.append(at_most(1.3, text, costs[1] / costs[0]))


def _storage(per_state: float, floor: float) -> Target:
    text = "each further snapshot, 1 % changed: at most twice its changed files and directories"
    return at_most(2.0, text, per_state / floor)


@contextmanager
def scratch(rubbish: list[Path] | None = None) -> Iterator[Path]:
    """A directory that is removed after a measurement; with `rubbish`, after all measurements.

    For minutes after many files were removed, ext4 is slow to find an inode for each new one, which the next
    measurement would pay for. So directories with many files stay to the end, as long as there is space.
    """
    path = Path(tempfile.mkdtemp(prefix="holdfast-bench-"))
    try:
        yield path
    finally:
        if rubbish is None or shutil.disk_usage(path).free < SPACE:
            remove_tree(path)
        else:
            rubbish.append(path)


def run_all(size: Size, report: Report) -> None:
    """Run all parts of the suite; its directories are removed after the report."""
    present(report, "snapshots")
    rubbish: list[Path] = []
    report.afterwards.append(lambda: remove_all(rubbish))
    try:
        measure_big_file(size.big, size.big_rounds, report)  # before the memory is full of small files
        for where, make in _sources(size):
            judge(where, measure_phases(where, make, size.rounds, report, rubbish), report)
        measure_clones(size.clones, size.rounds, report)
        measure_memory(size, report, rubbish)
        measure_growth(size, report, rubbish)
        measure_history(size, report, rubbish)
    except BaseException:  # there will be no report
        remove_all(rubbish)
        raise


def remove_all(rubbish: list[Path]) -> None:
    """Remove the directories of the measurements."""
    say("removing temporary directories")
    for path in rubbish:
        remove_tree(path)


def _sources(size: Size) -> Iterator[tuple[str, Callable[[Path], None]]]:
    yield f"{size.files} files of 1 KiB", lambda top: small_files(top, size)
    yield f"{size.packages} packages", lambda top: packages(top, size)


def run(*, quick: bool) -> Report:
    """Run the whole suite."""
    report = Report()
    engine = choose_engine(Path(tempfile.gettempdir()), Path(tempfile.gettempdir()))
    report.notes.append(f"snapshots: the engine is {Engine(engine)}")
    run_all(QUICK if quick else FULL, report)
    return report
