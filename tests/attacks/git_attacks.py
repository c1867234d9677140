"""Attacks on a git home: what git keeps in `.git` (settings, references, registrations, objects), and our records.

They are planted after the user has adopted the checkout, and approved what git's configuration named then.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

from proof.hostile.victim import Victim, read_json, write
from tests.attacks.planting import (
    Attack,
    change_record,
    clear,
    fifo,
    head_of,
    huge,
    link,
    plant_operation,
    regular_content,
)

READING = (
    *("info", "status", "history --all", "who", "worktree list", "doctor", "diff --patch", "verify --all", "conflicts"),
    "land open --dry-run",
)
CHANGING = (
    *("land open --wait 0", "land open --push --wait 0"),
    *("snapshot -m x", "restore v1 --inplace --reason x", "restore head restored", "export head {out}/exported"),
    *("worktree rename spare other", "worktree remove open --force", "gc plan", "gc run --plan {plan}"),
    *("doctor --fix", "snapshot push", "snapshot fetch"),
    "deinit --force",
)
CREATING = ("worktree create made", "worktree create again --from head")
ALL = (*READING, *CREATING, *CHANGING)
Plant = Callable[[Victim], object]


def common(victim: Victim) -> Path:
    return victim.place / ".git"


def _text(path: Path) -> str:
    return regular_content(path).decode()


def script(victim: Victim) -> str:
    """A program in the repository that does harm."""
    path = write(common(victim) / "harm.sh", f"#!/bin/sh\ntouch {victim.planted}\ncat\n")
    path.chmod(0o755)
    return str(path)


# --- Settings ---------------------------------------------------------------------------------------

_HOOKS = (
    *("post-index-change", "reference-transaction", "pre-push", "pre-auto-gc", "post-checkout", "post-merge"),
    *("pre-commit", "post-commit", "post-rewrite", "push-to-checkout", "proc-receive", "fsmonitor-watchman"),
)
_PROGRAMS = {
    "a monitor of the file system": "[core]\nfsmonitor = {harm}\n",
    "hooks elsewhere": "[core]\nhooksPath = {hooks}\n",
    "a pager and an editor": "[core]\npager = {harm}\neditor = {harm}\n[pager]\nls-tree = {harm}\nbranch = {harm}\n",
    "a difference program": '[diff]\nexternal = {harm}\n[diff "evil"]\ntextconv = {harm}\ncommand = {harm}\n',
    "a merge program": '[merge "evil"]\ndriver = {harm} %A\n[mergetool "evil"]\ncmd = {harm}\n',
    "signatures": "[commit]\ngpgSign = 1\n[tag]\ngpgSign = 1\n[push]\ngpgSign = if-asked\n[gpg]\nprogram = {harm}\n",
    "aliases of the commands that Holdfast uses": '[alias]\nupdate-index = "!{harm}"\nworktree = "!{harm}"\n',
    "a program that lists references": "[core]\nalternateRefsCommand = {harm}\n",
    "a program that asks for passwords": "[core]\naskPass = {harm}\n[credential]\nhelper = {harm}\n",
    "a program that packs": "[uploadpack]\npackObjectsHook = {harm}\n",
    "maintenance all the time": "[gc]\nauto = 1\nautoDetach = false\n[maintenance]\nauto = true\n",
    "a submodule with a command": '[submodule "x"]\nupdate = !{harm}\nactive = true\nurl = {harm}\n',
    "filters": '[filter "evil"]\nclean = {harm}\nsmudge = {harm}\n',
    "filters in the old form of sections": "[FILTER.evil]\nCLEAN = {harm}\nsmudge = {harm}\n",
    "a filter that stays": '[filter "evil"]process = {harm}\nrequired = true\n',
    "filters of a file in the work tree": "[include]\npath = ../evil.config\n",
    "filters of a file that an included file includes": "[include]\npath = ../outer.config\n",
    "filters on the branch of a new worktree": '[includeIf "onbranch:hf/**"]\npath = ../evil.config\n',
    "filters of the main worktree": "[extensions]\nworktreeConfig = true\n",
    "programs for remotes": '[core]\nsshCommand = {harm}\ngitProxy = {harm}\n[remote "origin"]\nurl = x:y\n'
    "uploadpack = {harm}\nreceivepack = {harm}\n",
    "a remote that is a command": '[protocol "ext"]\nallow = always\n[remote "origin"]\nurl = ext::{harm}\n',
    "a remote for missing objects": '[core]\nsshCommand = {harm}\n[remote "x"]\nurl = x:y\npromisor = true\n',
    "a program of LFS": '[lfs "customtransfer.x"]\npath = {harm}\n[lfs]\nstandalonetransferagent = x\n',
    "hooks with names of their own": "".join(
        f'[hook "{each}"]\nevent = {each}\ncommand = {{harm}}\n' for each in _HOOKS
    )
    + "".join(f'[hook "x"]\nevent = {each}\ncommand = {{harm}}\n' for each in _HOOKS),
    "a program that keeps objects": "[gc]\nrecentObjectsHook = {harm}\n",
    "bundles elsewhere": '[fetch]\nbundleURI = {home}/docs\n[bundle "x"]\nuri = {home}/docs\n',
    "references elsewhere": "[core]\nrepositoryFormatVersion = 1\n[extensions]\nrefStorage = files://{home}/trap\n",
    "objects of LFS elsewhere": "[lfs]\nstorage = {home}/trap\n",
    "another index and many logs": "[core]\nsplitIndex = true\nlogAllRefUpdates = always\n[index]\nsparse = 1\n",
}


def settings() -> Iterator[Attack]:
    for name, text in _PROGRAMS.items():
        yield Attack(f"git's settings have {name}", _settings(text), ALL)
    yield Attack("git's settings name another work tree", _settings("[core]\nworktree = {home}/docs\n"), ALL)
    yield Attack("git's settings name the home as work tree", _settings("[core]\nworktree = {home}\n"), ALL)
    yield Attack("git's settings name a work tree upwards", _settings("[core]\nworktree = ../../../home\n"), ALL)
    yield Attack("git's settings include the home", _settings("[include]\npath = {home}/docs/letter\n"), ALL)
    yield Attack("git's settings say that it is bare", _settings("[core]\nbare = true\n"), ALL)
    yield Attack("git's settings have an unknown extension", _settings("[extensions]\nunknown = x\n"), ALL)
    yield Attack("git's settings exclude by a file of the home", _settings("[core]\nexcludesFile = {home}/x\n"), ALL)
    yield Attack("every git hook does harm", lambda victim: _hooks(victim, common(victim) / "hooks"), ALL)
    yield Attack("attributes name programs that nobody has set", _attributes, ALL)
    yield Attack("the records are behind a link, and git's settings have filters", _behind_a_link, ALL)


def _settings(text: str) -> Plant:
    def plant(victim: Victim) -> None:
        if "{hooks}" in text:
            _hooks(victim, victim.place / "hooks")
        path = common(victim) / "config"
        values = {"{harm}": script(victim), "{hooks}": str(victim.place / "hooks"), "{home}": str(victim.home)}
        added = text
        for name, value in values.items():
            added = added.replace(name, value)
        write(path, _text(path) + added)
        filters = f'[filter "evil"]\nclean = {values["{harm}"]}\nsmudge = {values["{harm}"]}\n'
        write(victim.place / "outer.config", "[include]\npath = evil.config\n")
        for included in (victim.place / "evil.config", common(victim) / "config.worktree"):
            write(included, filters)
        _attributes(victim)

    return plant


def _behind_a_link(victim: Victim) -> None:
    os.rename(common(victim) / "holdfast", common(victim) / "moved")
    os.symlink("moved", common(victim) / "holdfast")
    _settings(_PROGRAMS["filters"])(victim)


def _hooks(victim: Victim, directory: Path) -> None:
    for name in _HOOKS:
        write(directory / name, Path(script(victim)).read_bytes()).chmod(0o755)


def _attributes(victim: Victim) -> None:
    write(common(victim) / "info/attributes", "* filter=evil diff=evil merge=evil\n")
    for place in (victim.place, victim.worktree("open")):
        write(place / ".gitattributes", "* filter=evil diff=evil merge=evil\n")
        write(place / "changed", f"in {place.name}\n")


# --- Which repository, which worktree ---------------------------------------------------------------


def places() -> Iterator[Attack]:
    for where, target in {"the home": "home", "a trap": "home/trap", "nothing": "home/planted"}.items():
        yield Attack(f"git's common directory is {where}", _common(target), ALL)
        yield Attack(f"the checkout's git directory is {where}", _checkout_file(target), ALL)
        yield Attack(f"a registration leads to {where}", _registered(f"{target}/.git"), (*_IN_SPARE, *ALL))
        yield Attack(f"a linked worktree's git directory is {where}", _linked_file(target), (*ALL, *_IN_SIDE))
        yield Attack(f"the common directory of a registration is {where}", _linked_common(target), ALL)
        yield Attack(f"a record says that a worktree is in {where}", _recorded(target), ALL)
        yield Attack(f"the note of the main checkout names {where}", _noted(target), ALL)
    for where, target in {"an empty directory": "home/empty", "a trap": "home/trap"}.items():
        yield Attack(f"a worktree to undo was to be in {where}", _begun(target), ("doctor --fix", *CREATING))
    yield Attack("the checkout is that of another repository of the user", _project("main"), (*ALL, "init"))
    yield Attack("a worktree is one of another repository of the user", _project("side"), (*ALL, *_IN_SIDE))
    yield Attack("git's common directory is that of another repository of the user", _project(""), (*ALL, "init"))
    for name in ("..", ".git", "-rf", "../../x", "main", "side", "a\nb", "x" * 300):
        yield Attack(f"a registration has the name {name[:20]!a}", _named(name), ALL)


_IN_SIDE = ("snapshot --worktree side -m x", "worktree remove side --force", "worktree rename side other --force")
_IN_SPARE = ("restore v1 --worktree spare --inplace --reason x",)


def _common(target: str) -> Plant:
    return lambda victim: write(common(victim) / "commondir", f"{victim.base / target}\n")


def _checkout_file(target: str) -> Plant:
    def plant(victim: Victim) -> None:
        os.rename(common(victim), victim.place / "kept")
        write(common(victim), f"gitdir: {victim.base / target}\n")

    return plant


def _registered(target: str) -> Plant:
    def plant(victim: Victim) -> None:
        for name in ("spare", "open"):
            write(common(victim) / f"worktrees/{name}/gitdir", f"{victim.base / target}\n")

    return plant


def _linked_file(target: str) -> Plant:
    return lambda victim: write(victim.worktree("side") / ".git", f"gitdir: {victim.base / target}\n")


def _linked_common(target: str) -> Plant:
    return lambda victim: write(common(victim) / "worktrees/spare/commondir", f"{victim.base / target}\n")


def _recorded(target: str) -> Plant:
    def plant(victim: Victim) -> None:
        path = victim.root / ".jvs/worktrees/spare/config.json"
        record = read_json(path)
        change_record(path, git={**(record.get("git") or {}), "path": str(victim.base / target)})
        plant_operation(victim, "open", kind="remove", worktree_id="open", path=str(victim.base / target))

    return plant


def _begun(target: str) -> Plant:
    """A creation to undo, of a directory that it has not made, on a branch whose lock is a sentinel."""

    def plant(victim: Victim) -> None:
        (victim.home / "empty").mkdir()
        lock = write(victim.home / "docs/mine.lock", "mine\n")
        branch = os.path.relpath(lock.with_suffix(""), common(victim) / "refs/heads")
        work = {"path": str(victim.base / target), "new": True, "branch": branch, "new_branch": True, "commit": "x"}
        plant_operation(victim, "made", kind="create", worktree_id="made", git=work)
        inside = {**work, "path": str(victim.worktree("again"))}
        plant_operation(victim, "again", kind="create", worktree_id="again", git=inside)

    return plant


def _noted(target: str) -> Plant:
    def plant(victim: Victim) -> None:
        config = common(victim) / "config"
        write(config, f"{_text(config)}[core]\nbare = true\n")
        write(victim.root / "checkout", f"{victim.base / target}\n")

    return plant


def _named(name: str) -> Plant:
    return lambda victim: write(common(victim) / "worktrees/spare/holdfast", f"{name}\n")


def _project(worktree: str) -> Plant:
    """Lead to a repository of the user's own, which has a home of Holdfast too."""

    def plant(victim: Victim) -> None:
        project = victim.home / "project"
        git = ("git", "-c", "user.name=u", "-c", "user.email=u@x")
        for words in (("init", "-q", "."), ("commit", "-q", "--allow-empty", "-m", "x")):
            project.mkdir(exist_ok=True)
            subprocess.run([*git, *words], cwd=project, env=victim.environment(), check=True, timeout=20)
        subprocess.run(["cp", "-r", victim.root, project / ".git/holdfast"], check=True)
        if worktree == "main":
            os.rename(common(victim), victim.place / "kept")
            write(common(victim), f"gitdir: {project / '.git'}\n")
        elif worktree:
            write(victim.worktree(worktree) / ".git", f"gitdir: {project / '.git'}\n")
        else:
            write(common(victim) / "commondir", f"{project / '.git'}\n")

    return plant


# --- References, objects and the private index ------------------------------------------------------

_LINKED = (
    *("objects", "objects/pack", "objects/info", "refs", "refs/heads", "refs/holdfast", "refs/holdfast/snapshots"),
    *("worktrees", "worktrees/spare", "worktrees/side", "logs", "info", "holdfast", "holdfast/.jvs/index", "hooks"),
    *("rr-cache", "sequencer", "rebase-merge", "modules", "lfs", "unknown", "worktrees/open/logs", "worktrees/open/x"),
)
_READ = (
    *("HEAD", "config", "index", "packed-refs", "worktrees/spare/gitdir", "worktrees/spare/commondir"),
    *("worktrees/spare/HEAD", "worktrees/spare/index", "worktrees/spare/holdfast", "refs/heads/trunk", "info/exclude"),
    *("holdfast/.jvs/index/main", "holdfast/.jvs/index/main.sums", "objects/info/alternates", "commondir", "shallow"),
    *("COMMIT_EDITMSG", "ORIG_HEAD", "FETCH_HEAD", "logs/HEAD", "objects/info/commit-graph", "objects/pack/x"),
)
_WRITTEN_BY_A_COMMIT = ("COMMIT_EDITMSG", "HEAD", "index", "logs/HEAD", "MERGE_RR", "MERGE_MSG", "ORIG_HEAD", "unknown")
_COMMITTING = ("land open --wait 0", "land open --dry-run", "snapshot --worktree open -m x")


def contents() -> Iterator[Attack]:
    for path in _LINKED:
        yield Attack(f".git/{path} is a link to a trap", _linked(path, "trap"), ALL)
    for path in _READ:
        yield Attack(f".git/{path} is a link to a sentinel", _linked(path, "docs/letter"), ALL)
        yield Attack(f".git/{path} is a fifo", _made(path, fifo), ALL)
        yield Attack(f".git/{path} is huge", _made(path, huge), READING)
    for path in (".gitignore", ".gitattributes", "src/.gitignore", ".gitmodules"):
        yield Attack(f"{path} is a fifo", lambda victim, path=path: fifo(victim.place / path), ALL)  # type: ignore[misc]
        yield Attack(f"{path} is a link to a sentinel", _work_linked(path), ALL)
    for name in _WRITTEN_BY_A_COMMIT:
        path = f"worktrees/open/{name}"
        yield Attack(
            f".git/{path} is a link to a sentinel, and there is work to commit", _committing(path), _COMMITTING
        )
    yield Attack("the records are a link to those of another repository", _other_records, ALL)
    yield Attack("every directory of objects is a link to a trap", _linked_objects, _COMMITTING)
    yield Attack("every object that work needs is a link to a sentinel", _linked_object, _COMMITTING)
    for name in ("..", "x", "0" * 16, "../../heads/trunk", "-d", "0123456789abcdef/x"):
        yield Attack(f"a reference of a snapshot is called {name!a}", _reference(name), ALL)
    yield Attack("a reference of a snapshot names no object", _wrong_reference("f" * 40), ALL)
    yield Attack("a reference of a snapshot is a link to a sentinel", _linked_reference, ALL)
    yield Attack("a reference of a snapshot is symbolic", _wrong_reference("ref: refs/heads/trunk"), ALL)
    yield Attack("a reference of a snapshot leads out", _wrong_reference("ref: ../../home/docs/letter"), ALL)
    yield Attack("incoming references without end", _incoming, ALL)
    yield Attack("objects are those of the home", _alternates, ALL)
    yield Attack("the private index is another program's", _private_index, ALL)
    yield Attack("a pack is kept for a snapshot with a strange name", _keep, ALL)
    yield Attack("a nested repository has settings of its own", _nested, ALL)
    yield Attack("a submodule has settings of its own", _submodule, ALL)
    for path in ("refs/heads/hf/deep", "logs/refs/heads/hf/deep", "refs/holdfast/landing", "refs/holdfast/candidates"):
        yield Attack(f".git/{path} is a link to a trap", _linked(path, "trap"), _DEEP)
    yield Attack("the lock of a reference deep down is a sentinel", _deep_lock, _DEEP)


def _linked(path: str, target: str) -> Plant:
    return lambda victim: link(common(victim) / path, victim.home / target)


def _made(path: str, make: Callable[[Path], None]) -> Plant:
    return lambda victim: make(common(victim) / path)


def _work(victim: Victim) -> Path:
    """Work that a landing has to commit, and that makes new objects."""
    return write(victim.worktree("open") / "src/new", "work\n")


def _committing(path: str) -> Plant:
    def plant(victim: Victim) -> None:
        link(common(victim) / path, victim.letter)
        _work(victim)

    return plant


def _other_records(victim: Victim) -> None:
    records, other = common(victim) / "holdfast", victim.trap / "records"
    records.rename(other)  # no copy: other attacks may have planted huge files
    records.symlink_to(other)


def _linked_objects(victim: Victim) -> None:
    for path in (common(victim) / f"objects/{number:02x}" for number in range(256)):
        if not path.exists():
            link(path, victim.trap)
    _work(victim)


def _linked_object(victim: Victim) -> None:
    """git touches an object that it would write, if there is one."""
    found = subprocess.run(["git", "hash-object", _work(victim)], capture_output=True, check=True).stdout.decode()
    link(common(victim) / f"objects/{found[:2]}/{found[2:].strip()}", victim.letter)


def _work_linked(path: str) -> Plant:
    return lambda victim: link(victim.place / path, victim.letter)


def _reference(name: str) -> Plant:
    def plant(victim: Victim) -> None:
        path = common(victim) / "packed-refs"
        write(path, f"{_text(path)}{_commit(victim)} refs/holdfast/snapshots/{name}\n")

    return plant


def _commit(victim: Victim) -> str:
    return _text(common(victim) / "refs/heads/trunk").strip()


def _wrong_reference(content: str) -> Plant:
    return lambda victim: write(common(victim) / f"refs/holdfast/snapshots/{head_of(victim)}", f"{content}\n")


def _linked_reference(victim: Victim) -> None:
    link(common(victim) / f"refs/holdfast/snapshots/{head_of(victim)}", victim.letter)


def _incoming(victim: Victim) -> None:
    for number in range(50):
        write(common(victim) / f"refs/holdfast/incoming/{number:016x}/../x{number}", f"{_commit(victim)}\n")


def _alternates(victim: Victim) -> None:
    write(
        common(victim) / "objects/info/alternates", f"{victim.home}\n{victim.trap}\n../../../../home\n{'/x' * 3000}\n"
    )


def _private_index(victim: Victim) -> None:
    for name in os.listdir(victim.root / ".jvs/index"):
        write(victim.root / ".jvs/index" / name, b"DIRC\0\0\0\2\xff\xff\xff\xff" + bytes(100))


def _keep(victim: Victim) -> None:
    for name in ("pack-x.keep", "pack-..keep", f"pack-{'0' * 40}.keep"):
        write(common(victim) / "objects/pack" / name, "holdfast ../../../home/docs\n")


def _nested(victim: Victim) -> None:
    """A repository in the work tree: git looks into it to find the commit that is checked out there."""
    nested = victim.place / "src/nested/.git"
    for name in ("objects", "refs"):
        (nested / name).mkdir(parents=True)
    write(nested / "HEAD", f"{_commit(victim)}\n")
    clear(nested / "config")
    _hooks(victim, nested / "hooks")
    text = f'[core]\nfsmonitor = {script(victim)}\nworktree = {victim.home}\n[filter "x"]\nclean = {script(victim)}\n'
    write(nested / "config", text)


_DEEP = (
    *("worktree create made --branch hf/deep/made", "worktree rename spare deep", "land open --wait 0"),
    *("worktree create other --branch hf/deep/x/y", "worktree remove open --force", "doctor --fix", "deinit --force"),
)


def _deep_lock(victim: Victim) -> None:
    link(common(victim) / "refs/holdfast/candidates", victim.home / "docs")
    write(victim.home / "docs/trunk/new.lock", "mine\n")


def _submodule(victim: Victim) -> None:
    """A nested repository that the index has: git starts another git in it, to see whether it has changes."""
    for place in (victim.place, victim.worktree("open")):
        nested = place / "module"
        for words in (("init", "-q", nested), ("-C", nested, "commit", "-q", "--allow-empty", "-m", "x")):
            git = ("git", "-c", "user.name=u", "-c", "user.email=u@x")
            subprocess.run([*git, *map(str, words)], cwd=place, env=victim.environment(), check=True, timeout=20)
        subprocess.run(
            ["git", "add", "module"], cwd=place, env=victim.environment(), check=True, timeout=20, capture_output=True
        )
        write(place / ".gitmodules", '[submodule "module"]\npath = module\nurl = x\nignore = none\n')
        write(nested / "new", "a change\n")
        config = nested / ".git/config"
        write(config, f"{_text(config)}[core]\nfsmonitor = {script(victim)}\n")


ATTACKS = [*settings(), *places(), *contents()]
