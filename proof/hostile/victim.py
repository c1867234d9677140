"""A victim: a home full of sentinels, and a real repository beside it that an attacker has prepared.

The home is recorded entry by entry (kind, mode, owner, size, times, links, content), so any change in it is noticed, a
file that was created and removed again too, by the time of its directory. Every sentinel contains `MARK`: if that
appears in the repository or in the output of a command, something outside was read.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from proof.hostile.runner import Job, Outcome

MARK = "SENTINEL-OF-THE-VICTIM"
"""In every file of the home."""
TRAPPED = "0123456789abcdef"
"""The name of a directory in the home that looks like a snapshot or a scratch directory."""
PASSWORD = "the-password-of-the-victim"
_OLD = 1_600_000_000
_MOST_READ = 1 << 20
NAMES = ("home", "repository", "data", "out")

Run = Callable[[Job], Outcome]


class Victim(NamedTuple):
    """A base directory with the home, the repository, a data directory, and a directory for exports. The repository is
    a plain home, or a git home: the checkout `main`, with linked worktrees in `main.worktrees`."""

    base: Path
    in_git: bool = False

    @property
    def home(self) -> Path:
        return self.base / "home"

    @property
    def repository(self) -> Path:
        """The repository, everything in which is untrusted."""
        return self.base / "repository"

    @property
    def root(self) -> Path:
        """The directory with the records."""
        return self.repository / "main/.git/holdfast" if self.in_git else self.repository

    @property
    def place(self) -> Path:
        """Where commands run."""
        return self.repository / "main" if self.in_git else self.repository

    @property
    def upwards(self) -> str:
        """The way from the records to the repository."""
        return "../../../" if self.in_git else ""

    def worktree(self, name: str) -> Path:
        return self.repository / ("main.worktrees" if self.in_git else "worktrees") / name

    @property
    def data(self) -> Path:
        """The data directory of Holdfast. It may grow, but nothing of the home goes there."""
        return self.base / "data"

    @property
    def out(self) -> Path:
        """Where the victim exports to."""
        return self.base / "out"

    @property
    def trap(self) -> Path:
        """A directory whose entries look like those that Holdfast sweeps, trims, overwrites and removes."""
        return self.home / "trap"

    @property
    def letter(self) -> Path:
        return self.home / "docs/letter"

    @property
    def planted(self) -> Path:
        """A path that must never exist."""
        return self.home / "planted"

    def environment(self, extra: Mapping[str, str] | None = None) -> dict[str, str]:
        """The environment of the victim's commands."""
        return {
            "PATH": os.environ.get("PATH", os.defpath),
            "HOME": str(self.home),
            "XDG_DATA_HOME": str(self.data),
            "PGPASSWORD": PASSWORD,
            "PYTHONDONTWRITEBYTECODE": "1",
            "HOLDFAST_DEBUG": "1",
            "HOLDFAST_ACTOR": "human:victim",
            "GIT_CONFIG_NOSYSTEM": "1",
            **(extra or {}),
        }

    def job(self, *arguments: str, cwd: Path | None = None, env: Mapping[str, str] | None = None, **more: Any) -> Job:
        """A command of the victim, by default in the repository."""
        return Job(arguments, str(cwd or self.place), self.environment(env), **more)


# --- The home ---------------------------------------------------------------------------------------


def make_victim(base: Path, *, in_git: bool = False) -> Victim:
    """A victim with a home, and with an empty directory for everything else."""
    victim = Victim(base, in_git)
    for name in NAMES:
        (base / name).mkdir(parents=True)
    for path, content in _sentinels(victim):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
        os.utime(path, (_OLD, _OLD))
    home = victim.home
    (home / ".ssh").chmod(0o700)
    (home / "docs/sealed").chmod(0o400)
    (home / "docs/link").symlink_to("letter")
    (home / "docs/elsewhere").symlink_to("/nowhere/at/all")
    (home / "docs/empty").mkdir()
    (home / ".claude").mkdir()
    for directory, _, _ in os.walk(home, topdown=False):
        os.utime(directory, (_OLD, _OLD))
    return victim


def victim_at(base: Path) -> Victim:
    """The victim that was made at a path."""
    return Victim(base, (base / "repository/main/.git").is_dir())


def renew_home(victim: Victim) -> None:
    """Replace a home that was harmed."""
    fresh = make_victim(victim.base.with_name("fresh"))
    remove_everything(victim.home)
    os.rename(fresh.home, victim.home)
    remove_everything(fresh.base)


def _sentinels(victim: Victim) -> Iterator[tuple[Path, str]]:
    home, trap = victim.home, victim.trap
    for name in (".bash_login", ".bashrc", ".ssh/authorized_keys", ".claude-settings.json", "docs/letter"):
        yield home / name, f"{MARK} {name}\n"
    for name in ("docs/sealed", "docs/deep/er/photo", "docs/deep/er/tax"):
        yield home / name, f"{MARK} {name}\n"
    # What each sweep, trim, refill, cache and list of Holdfast would take for its own.
    scratch = {"scratch_id": TRAPPED, "purpose": MARK, "begun_at": "2020-01-01T00:00:00Z", "holder_id": "h:u:1:1"}
    for name in (TRAPPED, f"{TRAPPED}.swept", "main", "side", "tree"):
        for file in ("payload/precious", "payload/src/a", "tree/payload/precious", "manifest", "homes", "removed/x"):
            yield trap / name / file, f"{MARK} {name}/{file}\n"
        yield trap / name / "intent.json", json.dumps(scratch)
        yield trap / name / "config.json", f"{MARK}\n"
        yield trap / name / ".READY", f'{{"payload_hash":"{MARK}"}}\n'
    for name in ("ticket.json", "main.json", "main.stat", "side.stat", "0", "7", "63", "collector.lock"):
        yield trap / name, f"{MARK} {name}\n"
    for name in (".x-0123456789ab.tmp", "00.done", "00.json", "event-000001.json", "ledger.lock", "1.2.lock"):
        yield trap / name, f"{MARK} {name}\n"
    for name in ("audit.jsonl", "events.jsonl", "index.json", "gates.json", "settings.json", "hooks.json", "mcp.json"):
        yield trap / name, f"{MARK} {name}\n"


def own(base: Path, user: int) -> None:
    """Give everything below a directory to a user."""
    if sys.platform == "win32":
        raise NotImplementedError
    os.chown(base, user, user)
    for directory, names, files in os.walk(base):
        for name in (*names, *files):
            os.chown(os.path.join(directory, name), user, user, follow_symlinks=False)


# --- Noticing changes -------------------------------------------------------------------------------


def recorded(victim: Victim) -> dict[str, tuple[object, ...]]:
    """Everything in the home, and the names beside it."""
    found: dict[str, tuple[object, ...]] = {"": tuple(sorted(os.listdir(victim.base)))}
    top = os.fspath(victim.home)
    waiting = [top]
    found["home"] = _facts(top, os.lstat(top))
    while waiting:
        directory = waiting.pop()
        with os.scandir(directory) as entries:
            for entry in entries:
                status = entry.stat(follow_symlinks=False)
                found[os.path.relpath(entry.path, victim.base)] = _facts(entry.path, status)
                if stat.S_ISDIR(status.st_mode):
                    waiting.append(entry.path)
    return found


def _facts(path: str, status: os.stat_result) -> tuple[object, ...]:
    """What must not change: the time of change notices even what was undone, except that reading is free."""
    kept = (status.st_mode, status.st_uid, status.st_gid, status.st_ino, status.st_nlink, status.st_size)
    times = (status.st_mtime_ns, status.st_ctime_ns)
    if stat.S_ISLNK(status.st_mode):
        return (*kept, *times, os.readlink(path))
    if stat.S_ISREG(status.st_mode):
        with contextlib.suppress(PermissionError), open(path, "rb") as file:
            return (*kept, *times, hashlib.sha256(file.read(_MOST_READ)).hexdigest())
    return (*kept, *times)


def changes(before: Mapping[str, tuple[object, ...]], after: Mapping[str, tuple[object, ...]]) -> list[str]:
    """The differences between two records, for people."""
    found = [f"removed {path}" for path in before if path not in after]
    found += [f"created {path}" for path in after if path not in before]
    found += [f"changed {path}" for path in before if path in after and before[path] != after[path]]
    return sorted(found)


def is_leaked(outcome: Outcome) -> bool:
    """Whether a command printed content of the home."""
    return MARK in outcome.out or MARK in outcome.err


def leaks(victim: Victim) -> list[str]:
    """Where the content of the home appears outside of it; links that lead there are not followed."""
    mark = MARK.encode()
    found = []
    for top in (victim.repository, victim.data, victim.out):
        for directory, _, files in os.walk(top):
            for name in files:
                path = os.path.join(directory, name)
                with contextlib.suppress(OSError):
                    if mark in _regular_content(path):
                        found.append(f"read into {os.path.relpath(path, victim.base)}")
    return sorted(found)


def _regular_content(path: str) -> bytes:
    if not stat.S_ISREG(os.lstat(path).st_mode):
        return b""
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0))
    try:
        return os.read(descriptor, _MOST_READ)
    finally:
        os.close(descriptor)


# --- The repository ---------------------------------------------------------------------------------

_WORK = (
    "mkdir -p src/deep lib; [ -e lib/x ] || echo x >lib/x; echo a{n} >src/deep/a; echo b >src/b; "
    "ln -sf b src/l; echo top{n} >top; ln -f top src/hard"
)


def make_repository(victim: Victim, run: Run) -> None:
    """A repository with everything in it that the commands of Holdfast leave: nothing is made by hand except for what
    a killed process would leave."""

    def holdfast(*arguments: str, cwd: Path | None = None) -> str:
        outcome = run(victim.job(*arguments, cwd=cwd))
        if outcome.status != 0:
            raise RuntimeError(f"{arguments} failed: {outcome}")
        return outcome.out.strip()

    root = victim.root
    if victim.in_git:
        _make_checkout(victim)
        holdfast("init")
    else:
        victim.repository.rmdir()
        holdfast("init", str(victim.repository), cwd=victim.base)
    for number in range(3):
        holdfast("run", "--snapshot", "-m", f"number {number}", "--", "sh", "-c", _WORK.format(n=number))
    holdfast("worktree", "create", "side", "--from", "head", "--label", "beside")
    holdfast("run", "--worktree", "side", "--snapshot", "--", "sh", "-c", "echo side >mine; rm src/b")
    holdfast("worktree", "create", "open", "--shared", "--from", "head")
    holdfast("worktree", "create", "spare", "--from", "head")
    holdfast("ref", "create", "v1", "head", "-m", "a name")
    holdfast("pin", "add", "head", "--reason", "kept", "--keep-for", "30d")
    holdfast("gc", "policy", "--keep-last", "1")
    plan = json.loads(holdfast("gc", "plan", "--json"))["data"]["plan"]
    holdfast("gc", "run", "--plan", plan)
    for note in ("again", "once more"):  # the first of the two can be collected
        holdfast("run", "--snapshot", "-m", note, "--", "sh", "-c", "echo new >>top")
    holdfast("gc", "plan")
    holdfast("issue", "init")
    first = holdfast("issue", "create", "first", "--field", "id")
    holdfast("gate", "define", "tests", "--checker", "true")
    holdfast("gate", "define", "review")
    holdfast("issue", "create", "second", "--depends-on", first, "--gate", "tests", "--label", "x")
    holdfast("issue", "create", "third")
    holdfast("issue", "claim", first, "--ttl", "24h")
    holdfast("ledger", "init", "--claim-files")
    holdfast("ledger", "append", '{"type":"note","text":"one"}')
    holdfast("ledger", "claim", "1.2", "--actor", "agent:other", "--ttl", "1h")
    holdfast("ledger", "claims")
    holdfast("lease", "acquire", "--worktree", "side", "--ttl", "24h", "--purpose", "mine", "--holder-pid", "1")
    for name in os.listdir(root / ".jvs/reserve"):
        if name not in ("0", "63"):
            (root / ".jvs/reserve" / name).unlink()
    (root / ".jvs/reserve/0").write_bytes(b"")
    _leave_what_the_killed_leave(victim)


def _make_checkout(victim: Victim) -> None:
    """The checkout of a git repository with two commits, one of them in a pack."""

    def git(*arguments: str) -> None:
        who = {f"GIT_{role}_{field}": "u@x" for role in ("AUTHOR", "COMMITTER") for field in ("NAME", "EMAIL")}
        subprocess.run(["git", *arguments], cwd=victim.place, env=victim.environment(who), check=True)

    write(victim.place / ".gitignore", "*.log\n")
    write(victim.place / ".gitattributes", "*.txt text\n")
    write(victim.place / "a.txt", "text\n")
    git("init", "--quiet", "--template=", "--initial-branch", "trunk")
    git("add", "--all")
    git("commit", "--quiet", "--message", "one")
    git("gc", "--quiet")
    git("commit", "--quiet", "--allow-empty", "--message", "two")


def _leave_what_the_killed_leave(victim: Victim) -> None:
    root = victim.root
    scratch = root / ".jvs/tmp/00000000000000aa"
    record = {"scratch_id": scratch.name, "purpose": "snapshot", "begun_at": now(), "holder_id": "host:user:1:1"}
    write(scratch / "intent.json", json.dumps(record))
    write(scratch / "lock", "")
    write(scratch / "tree/payload/half", "half")
    note: dict[str, Any] = {
        "ticket": "00aa",
        "kind": "lock",
        "name": "x",
        "place": str(root),
        "since": now(),
        "agent": "",
    }
    note |= {
        "actor": "",
        "purpose": "",
        "proof": "",
        "shared": False,
        "above": [],
        "holder_id": "host:user:1:1",
        "boot_id": "",
    }
    write(root / ".jvs/waits/00aa.json", json.dumps({**note, "machine_id": "", "pid_namespace": ""}))
    write(root / ".holdfast/intents/.gone-0123456789ab.tmp", "{}")


def now() -> str:
    from holdfast.clock import SYSTEM_CLOCK, format_instant

    return format_instant(SYSTEM_CLOCK.wall())


def write(path: Path, content: str | bytes) -> Path:
    """Write a file with its directories, in place of any link or file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.is_symlink() or path.exists():
        path.unlink()
    path.write_bytes(content if isinstance(content, bytes) else content.encode("utf-8", "surrogatepass"))
    return path


def verdict(
    victim: Victim,
    before: Mapping[str, tuple[object, ...]],
    done: Iterable[tuple[Sequence[str], Outcome]],
) -> list[str]:
    """Everything that these commands did wrong, given the record of the home from before them."""
    commands = list(done)
    found = [f"'{' '.join(each)}': {outcome.problem}" for each, outcome in commands if outcome.problem]
    found += [f"'{' '.join(each)}' printed the home" for each, outcome in commands if is_leaked(outcome)]
    return [*found, *changes(before, recorded(victim)), *leaks(victim)]


def read_json(path: Path) -> Any:
    """The content of a JSON file; `ValueError` if another attack has made it something else."""
    return json.loads(_regular_content(os.fspath(path)))


def copy_victim(victim: Victim, base: Path) -> Victim:
    """A copy of a victim elsewhere."""
    copy_tree(victim.base, base)
    copied = victim._replace(base=base)
    if victim.in_git:
        was, here = recorded_path(victim), os.fsencode(copied.repository)
        for path in copied.repository.rglob("*"):
            if path.is_file() and not path.is_symlink() and was in (content := path.read_bytes()):
                write(path, relocated(content, was, here))
    return copied


def relocated(content: bytes, was: bytes, here: bytes) -> bytes:
    """The content of a file with another path of the repository; an index has a checksum, and need not know."""
    return content if content.startswith(b"DIRC") else content.replace(was, here)


def recorded_path(victim: Victim) -> bytes:
    """The path of the repository that its files name: git writes down where linked worktrees are."""
    if not victim.in_git:
        return os.fsencode(victim.repository)
    content = (victim.root.parent / "worktrees/side/gitdir").read_bytes()
    return content.removesuffix(b"/main.worktrees/side/.git\n")


def copy_tree(source: str | os.PathLike[str], target: str | os.PathLike[str]) -> None:
    """Copy a directory with links, modes, times and the names of its hard links' content."""
    shutil.copytree(source, target, symlinks=True)


def remove_everything(path: Path) -> None:
    """Remove a directory, whatever its modes are."""

    def retry(function: Callable[..., Any], name: str, _: object) -> None:
        with contextlib.suppress(OSError):
            os.chmod(os.path.dirname(name), 0o700)
            if os.path.isdir(name) and not os.path.islink(name):
                os.chmod(name, 0o700)
                shutil.rmtree(name, ignore_errors=True)
            function(name)

    shutil.rmtree(path, onerror=retry)
