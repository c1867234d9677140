"""Programs that save and restore states of a directory: Holdfast and its peers."""

from __future__ import annotations

import os
import shutil
import subprocess
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path

from bench.report import Report
from holdfast.trees.capture import capture
from holdfast.trees.engines import choose_engine
from holdfast.trees.restore import materialise

OURS = "holdfast"
PHASES = ("first", "unchanged", "changed", "restore")


class Contender(ABC):
    """A program that saves states of `source` in `place` and restores them."""

    program: str | None = None
    phases: tuple[str, ...] = PHASES
    every_round = True

    def __init__(self, source: Path, place: Path) -> None:
        self.source, self.place, self.count = source, place, 0
        place.mkdir(parents=True)

    @abstractmethod
    def take(self) -> None:
        """Save the current state of the source."""

    @abstractmethod
    def restore(self, target: Path) -> None:
        """Restore the last state to `target`."""

    def next(self) -> Path:
        """The path of the next state."""
        self.count += 1
        return self.place / f"{self.count}"

    def last(self) -> Path:
        """The path of the last state."""
        return self.place / f"{self.count}"


class Holdfast(Contender):
    """Ours, called as a library."""

    def take(self) -> None:
        base = self.last() if self.count else None
        tree, cache = self.next(), self.place / "cache"
        engine = choose_engine(self.source, self.place)
        capture(self.source, tree, engine=engine, base=base, cache=cache, quiesced=True)

    def restore(self, target: Path) -> None:
        materialise(self.last(), target, cache=self.place / "cache-of-restored")


class Copy(Contender):
    """A plain copy."""

    program = "cp"
    phases = ("first", "restore")  # a copy costs the same whatever has changed

    def take(self) -> None:
        call("cp", "-a", self.source, self.next())

    def restore(self, target: Path) -> None:
        call("cp", "-a", self.last(), target)


class Links(Contender):
    """The floor for hard links: copies and checks no content."""

    program = "cp"
    phases = ("first", "unchanged", "changed")

    def __init__(self, source: Path, place: Path) -> None:
        super().__init__(source, place)
        self.source = place / "copy"  # links to the source itself would change the times of its files
        call("cp", "-a", source, self.source)

    def take(self) -> None:
        call("cp", "-al", self.source, self.next())

    def restore(self, target: Path) -> None:
        raise NotImplementedError


class Rsync(Contender):
    """rsync with links to the previous state."""

    program = "rsync"
    every_round = False

    def take(self) -> None:
        options = [f"--link-dest={self.last()}"] if self.count else []
        call("rsync", "-a", *options, f"{self.source}/", f"{self.next()}/")

    def restore(self, target: Path) -> None:
        call("rsync", "-a", f"{self.last()}/", f"{target}/")


class Git(Contender):
    """git, without garbage collection."""

    program = "git"
    every_round = False

    def _git(self, *arguments: object, work: Path | None = None) -> None:
        options = ["-c", "gc.auto=0", "-c", "user.name=b", "-c", "user.email=b@localhost"]
        call("git", *options, f"--git-dir={self.place}/git", f"--work-tree={work or self.source}", *arguments)

    def take(self) -> None:
        if not self.count:
            call("git", "init", "-q", "--bare", f"{self.place}/git")
            self._git("config", "core.bare", "false")
        self.next()
        self._git("add", "-A")
        self._git("commit", "-qm", "state", "--allow-empty")

    def restore(self, target: Path) -> None:
        target.mkdir()
        self._git("checkout", "-q", "HEAD", "--", ".", work=target)


class Restic(Contender):
    """restic, with a cache directory of its own."""

    program = "restic"
    every_round = False

    def _restic(self, *arguments: object) -> None:
        secret = {"RESTIC_PASSWORD": "bench", "RESTIC_CACHE_DIR": f"{self.place}/cache"}
        call("restic", "-q", "-r", f"{self.place}/repository", *arguments, environment=secret)

    def take(self) -> None:
        if not self.count:
            self._restic("init")
        self.next()
        self._restic("backup", self.source)

    def restore(self, target: Path) -> None:
        self._restic("restore", "latest", "--target", target)


class Borg(Contender):
    """borg without encryption."""

    program = "borg"
    phases = ("first", "changed")
    every_round = False

    def _borg(self, *arguments: object, directory: Path | None = None) -> None:
        call("borg", *arguments, environment={"BORG_BASE_DIR": f"{self.place}/base"}, directory=directory)

    def take(self) -> None:
        if not self.count:
            self._borg("init", "-e", "none", f"{self.place}/repository")
        state = self.next().name
        self._borg("create", f"{self.place}/repository::{state}", ".", directory=self.source)

    def restore(self, target: Path) -> None:
        target.mkdir()
        self._borg("extract", f"{self.place}/repository::{self.count}", directory=target)


CONTENDERS: dict[str, type[Contender]] = {
    OURS: Holdfast,
    "cp -a": Copy,
    "cp -al": Links,
    "rsync": Rsync,
    "git": Git,
    "restic": Restic,
    "borg": Borg,
}


def call(*command: object, environment: Mapping[str, str] | None = None, directory: Path | None = None) -> None:
    """Run a program; it must succeed."""
    words = [str(each) for each in command]
    full = {**os.environ, **(environment or {})}
    done = subprocess.run(words, env=full, cwd=directory, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        output = (done.stderr or done.stdout).strip().splitlines()[-1:]
        raise ChildProcessError(f"`{' '.join(words[:4])} ...` ended with {done.returncode}: {output}")


def present(report: Report, where: str) -> dict[str, type[Contender]]:
    """The contenders that are installed here."""
    found = {}
    for name, kind in CONTENDERS.items():
        if kind.program is None or shutil.which(kind.program):
            found[name] = kind
        else:
            report.notes.append(f"{where}: {name} is NOT INSTALLED and was left out")
    return found
