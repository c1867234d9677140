"""Programs that keep states of a directory: ours, and those that people use for that."""

from __future__ import annotations

import os
import shutil
import subprocess
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path

from bench.report import Report
from holdfast.trees import capture, choose_engine, materialise

OURS = "holdfast"
PHASES = ("first", "unchanged", "changed", "restore")


class Contender(ABC):
    """Something that keeps states of `source` in `place` and gives them back."""

    program: str | None = None
    phases: tuple[str, ...] = PHASES
    every_round = True

    def __init__(self, source: Path, place: Path) -> None:
        self.source, self.place, self.count = source, place, 0
        place.mkdir(parents=True)

    @abstractmethod
    def take(self) -> None:
        """Keep the source as it is now."""

    @abstractmethod
    def restore(self, target: Path) -> None:
        """Make `target` the state that was kept last."""

    def next(self) -> Path:
        """Where the next state goes."""
        self.count += 1
        return self.place / f"{self.count}"

    def last(self) -> Path:
        """Where the last state is."""
        return self.place / f"{self.count}"


class Holdfast(Contender):
    """Ours, as the library is used."""

    def take(self) -> None:
        base = self.last() if self.count else None
        tree, cache = self.next(), self.place / "cache"
        engine = choose_engine(self.source, self.place)
        capture(self.source, tree, engine=engine, base=base, cache=cache, quiesced=True)

    def restore(self, target: Path) -> None:
        materialise(self.last(), target, cache=self.place / "cache-of-restored")


class Copy(Contender):
    """The plain copy."""

    program = "cp"
    phases = ("first", "restore")  # whatever has changed, a copy is a copy

    def take(self) -> None:
        call("cp", "-a", self.source, self.next())

    def restore(self, target: Path) -> None:
        call("cp", "-a", self.last(), target)


class Links(Contender):
    """The floor of hard-linking: no content, no check."""

    program = "cp"
    phases = ("first", "unchanged", "changed")

    def __init__(self, source: Path, place: Path) -> None:
        super().__init__(source, place)
        self.source = (
            place / "copy"
        )  # not the source itself: links to it would change the times of all its files
        call("cp", "-a", source, self.source)

    def take(self) -> None:
        call("cp", "-al", self.source, self.next())

    def restore(self, target: Path) -> None:
        raise NotImplementedError


class Rsync(Contender):
    """rsync with links to the state before."""

    program = "rsync"
    every_round = False

    def take(self) -> None:
        options = [f"--link-dest={self.last()}"] if self.count else []
        call("rsync", "-a", *options, f"{self.source}/", f"{self.next()}/")

    def restore(self, target: Path) -> None:
        call("rsync", "-a", f"{self.last()}/", f"{target}/")


class Git(Contender):
    """git, without anything that is done later, such as packing."""

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
    """restic, with its cache in a place of its own."""

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


def call(
    *command: object, environment: Mapping[str, str] | None = None, directory: Path | None = None
) -> None:
    """Run a program to its end; it must succeed."""
    words = [str(each) for each in command]
    full = {**os.environ, **(environment or {})}
    done = subprocess.run(words, env=full, cwd=directory, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        said = (done.stderr or done.stdout).strip().splitlines()[-1:]
        raise ChildProcessError(f"`{' '.join(words[:4])} ...` ended with {done.returncode}: {said}")


def present(report: Report, where: str) -> dict[str, type[Contender]]:
    """The contenders that can be had here."""
    found = {}
    for name, kind in CONTENDERS.items():
        if kind.program is None or shutil.which(kind.program):
            found[name] = kind
        else:
            report.notes.append(f"{where}: {name} is NOT THERE and was left out")
    return found
