"""Campaigns: thousands of damaged repositories, and the commands that meet them.

    python -m proof.hostile.campaign mutations TEMPLATE SEED FIRST COUNT
    python -m proof.hostile.campaign damage TEMPLATE SEED FIRST COUNT

`mutations` makes a random mutation of a real repository and runs random commands in it. `damage` goes through a matrix:
each file, each kind of damage, each of a set of commands. If it runs as root, the commands run as a user who owns the
home and the repository. Each finding is a line of JSON; the last line counts the cases. A case can be repeated alone by
its number and the seed.
"""

from __future__ import annotations

import json
import os
import random
import re
import stat
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

from proof.hostile import damage
from proof.hostile.commands import CommandLine, command_lines, facts_of, filled
from proof.hostile.runner import Job, Outcome, execute, load_everything
from proof.hostile.victim import (
    Victim,
    changes,
    copy_tree,
    is_leaked,
    leaks,
    make_victim,
    own,
    recorded,
    recorded_path,
    relocated,
    remove_everything,
    renew_home,
    victim_at,
)

NOBODY = 65534
COMMANDS_PER_REPOSITORY = 4
LIMIT = 8.0
Execute = Callable[..., Outcome]

MATRIX = (
    *("info", "who", "doctor", "doctor --fix", "worktree list", "history --all", "status", "verify --all", "gc plan"),
    *("snapshot -m x", "worktree create made --from head", "restore v1 --inplace --reason x", "worktree remove spare"),
    *(
        "lease acquire --ttl 5m --purpose x",
        "guard {main}/top {side}/mine",
        "hook before-write",
        "audit --verify",
    ),
    *("issue list --json", "issue claim-next --ttl 5m", "issue validate --fix", "ledger log", "ledger verify"),
    *("ledger append {event}", "ledger claim 1.3 --actor agent:me --ttl 5s"),
)
"""The commands of the matrix, in this order on each damaged repository."""
GIT_MATRIX = (
    *("status", "worktree list", "doctor", "snapshot -m x", "restore v1 --inplace --reason x", "worktree create made"),
    *("worktree remove spare --force", "doctor --fix"),
)
"""The same in a git home: the commands that start git."""
_IN_GIT = re.compile(r"main/\.git/(?!holdfast)|main/\.git/holdfast/\.jvs/index|.*/\.git\w*$")
_SORT = re.compile(r"[0-9a-f]{8,}|/[0-9a-f]{2}/|\b(open|side|spare)\b")


class Entry(NamedTuple):
    """An entry of the template, kept in memory so that copies are made quickly."""

    path: str
    kind: int
    mode: int
    content: bytes
    mtime_ns: int


class Blueprint:
    """A sound repository that can be rebuilt anywhere."""

    def __init__(self, victim: Victim) -> None:
        self.entries = list(_entries(os.fspath(victim.repository), ""))
        self._was = recorded_path(victim)
        self._ours = (".git/", "main/.git", "main.w") if victim.in_git else (".j", ".h", "ledger", "locks", "meta")
        self.files = [each.path for each in self.entries if each.kind == stat.S_IFREG]
        place = os.path.relpath(victim.place, victim.repository)  # where commands run: it stays
        self.directories = [each.path for each in self.entries if each.kind == stat.S_IFDIR and each.path != place]
        self._is_git = victim.in_git

    def build(self, root: Path) -> None:
        """Rebuild it at a path that does not exist, with its paths."""
        os.mkdir(root)
        top = os.fspath(root)
        here = os.fsencode(root)
        for path, kind, mode, content, mtime_ns in self.entries:
            where = f"{top}/{path}"
            if kind == stat.S_IFDIR:
                os.mkdir(where)
            elif kind == stat.S_IFLNK:
                os.symlink(content, os.fsencode(where))
            else:
                descriptor = os.open(where, os.O_WRONLY | os.O_CREAT, mode)
                os.write(descriptor, relocated(content, self._was, here))
                os.utime(descriptor, ns=(mtime_ns, mtime_ns))
                os.close(descriptor)
        for path, kind, _, _, mtime_ns in reversed(self.entries):
            if kind == stat.S_IFDIR:
                os.utime(f"{top}/{path}", ns=(mtime_ns, mtime_ns))

    def cells(self) -> list[tuple[str, str]]:
        """The cells of the matrix: each file with each kind of damage. In a git home, the files that a plain home does
        not have, one of each sort."""
        files = self.files
        if self._is_git:
            files = list({_SORT.sub("*", each): each for each in files if _IN_GIT.match(each)}.values())
        return [(path, kind) for path in files for kind in damage.KINDS]

    def interesting(self, chance: random.Random) -> str:
        """A file or a directory: the records of Holdfast and git more often than the users' files, of which any will
        do."""
        pool = self.files if chance.random() < 0.75 else self.directories
        ours = [each for each in pool if each.startswith(self._ours)]
        return chance.choice(ours if chance.random() < 0.9 else pool)


def _entries(top: str, below: str) -> Iterator[Entry]:
    with os.scandir(f"{top}/{below}") as listed:
        for each in sorted(listed, key=lambda entry: entry.name):
            path = f"{below}/{each.name}" if below else each.name
            status = each.stat(follow_symlinks=False)
            kind, mode = stat.S_IFMT(status.st_mode), stat.S_IMODE(status.st_mode)
            if kind == stat.S_IFLNK:
                yield Entry(path, kind, mode, os.fsencode(os.readlink(each.path)), status.st_mtime_ns)
                continue
            content = Path(each.path).read_bytes() if kind == stat.S_IFREG else b""
            yield Entry(path, kind, mode, content, status.st_mtime_ns)
            if kind == stat.S_IFDIR:
                yield from _entries(top, path)


class Case(NamedTuple):
    """One damaged repository, and the commands to run in it."""

    number: int
    name: str
    spoil: Callable[[Victim], object]
    commands: Sequence[CommandLine]


class Campaign:
    """Runs cases one after the other, in one place. A context manager."""

    def __init__(self, template: Victim, *, run: Execute = execute) -> None:
        memory = "/dev/shm" if os.access("/dev/shm", os.W_OK | os.X_OK) else None
        self._directory = Path(tempfile.mkdtemp(prefix="holdfast-campaign-", dir=memory))
        self._directory.chmod(0o755)
        self._run = run
        self.victim = make_victim(self._directory / "base", in_git=template.in_git)
        self.victim.repository.rmdir()
        copy_tree(template.repository, self.victim.repository)  # only to read its ids
        self.facts = facts_of(self.victim)
        remove_everything(self.victim.repository)
        self.blueprint = Blueprint(template)
        self._user = NOBODY if sys.platform == "linux" and os.geteuid() == 0 else None
        if self._user is not None:
            own(self.victim.base, self._user)
        self._before = recorded(self.victim)
        self.cases = 0

    def try_case(self, case: Case) -> list[dict[str, Any]]:
        """Run the commands of a case; return what they did wrong."""
        findings: list[dict[str, Any]] = []

        def prepare() -> None:
            os.umask(0o022)
            self.blueprint.build(self.victim.repository)
            case.spoil(self.victim)

        for number, line in enumerate(case.commands):
            self.cases += 1
            job = Job(
                line.arguments,
                str(self.victim.place),
                self.victim.environment(),
                stdin=line.stdin,
                user=self._user,
                limit=LIMIT,
            )
            outcome = self._run(job, prepare=None if number else prepare)
            problems = [outcome.problem] if outcome.problem else []
            problems += ["it printed the home"] if is_leaked(outcome) else []
            problems += self._changes()
            findings += [_finding(case, line, each, outcome) for each in problems[:3]]
        findings += [_finding(case, case.commands[-1], each) for each in leaks(self.victim)[:3]]
        self._clean()
        return findings

    def _changes(self) -> list[str]:
        after = recorded(self.victim)
        found = changes({**self._before, "": ()}, {**after, "": ()})
        if found:
            self._restore_home()
        return found

    def _restore_home(self) -> None:
        renew_home(self.victim)
        if self._user is not None:
            own(self.victim.home, self._user)
        self._before = recorded(self.victim)

    def _clean(self) -> None:
        if self.victim.repository.is_symlink() or self.victim.repository.exists():
            remove_everything(self.victim.repository)
        for top in (self.victim.data, self.victim.out):
            if os.listdir(top):
                remove_everything(top)
                top.mkdir()
                if self._user is not None:
                    own(top, self._user)
        self._before[""] = ()

    def close(self) -> None:
        remove_everything(self._directory)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *problem: object) -> None:
        self.close()


def _finding(case: Case, line: CommandLine, problem: str, outcome: Outcome | None = None) -> dict[str, Any]:
    found = {"case": case.number, "spoiled": case.name, "command": str(line), "problem": problem}
    if outcome is not None:
        found["said"] = outcome.err[:1000] + outcome.err[1000:][-1000:]  # where a hang was is at the beginning
    return found


# --- The two campaigns ------------------------------------------------------------------------------


def mutations(campaign: Campaign, seed: object, numbers: range) -> Iterator[Case]:
    """Random mutations; each number has its own chance."""
    lines, blueprint = command_lines(campaign.facts), campaign.blueprint
    for number in numbers:
        chance = random.Random(f"{seed} {number}")
        spoiled = [blueprint.interesting(chance) for _ in range(chance.choice((1, 1, 1, 2, 3)))]
        dice = random.Random(chance.random())

        def spoil(victim: Victim, spoiled: list[str] = spoiled, dice: random.Random = dice) -> None:
            for path in spoiled:
                where = f"{victim.repository}/{path}"
                if os.path.realpath(os.path.dirname(where)) != os.path.dirname(where):
                    continue  # an earlier mutation has made a link: this one would write through it
                try:
                    is_directory = stat.S_ISDIR(os.lstat(where).st_mode)
                    (damage.mutate_directory if is_directory else damage.mutate_file)(where, victim, dice)
                except (FileNotFoundError, FileExistsError, IsADirectoryError, NotADirectoryError, PermissionError):
                    continue  # an earlier mutation has removed it, or closed it or what it is in

        yield Case(number, ", ".join(spoiled), spoil, chance.sample(lines, COMMANDS_PER_REPOSITORY))


def damaged(campaign: Campaign, seed: object, numbers: range) -> Iterator[Case]:
    """The matrix: one case for each file and kind of damage, with all commands of the matrix."""
    known = {str(each): each for each in command_lines(campaign.facts)}
    texts = [str(filled(line.split(), campaign.facts)) for line in matrix_of(campaign.victim)]
    lines = [known.get(text) or CommandLine(tuple(text.split())) for text in texts]
    cells = campaign.blueprint.cells()
    for number in numbers:
        path, kind = cells[number % len(cells)]
        chance = random.Random(f"{seed} {number}")

        def spoil(victim: Victim, path: str = path, kind: str = kind, chance: random.Random = chance) -> None:
            damage.KINDS[kind](f"{victim.repository}/{path}", victim, chance)

        yield Case(number, f"{path} {kind}", spoil, lines)


def matrix_of(victim: Victim) -> Sequence[str]:
    """The commands that each repository of the matrix meets."""
    return GIT_MATRIX if victim.in_git else MATRIX


def size_of_matrix(template: Victim) -> int:
    """How many repositories the matrix has."""
    return len(Blueprint(template).cells())


KINDS = {"mutations": mutations, "damage": damaged}


def main(arguments: Sequence[str]) -> int:
    kind, template, seed, first, count = arguments
    load_everything()
    with Campaign(victim_at(Path(template))) as campaign:
        for case in KINDS[kind](campaign, seed, range(int(first), int(first) + int(count))):
            for finding in campaign.try_case(case):
                sys.stdout.write(json.dumps(finding) + "\n")
                sys.stdout.flush()
        sys.stdout.write(json.dumps({"cases": campaign.cases}) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
