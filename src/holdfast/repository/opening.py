"""Finding and opening the issue tracker of a directory."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

import msgspec

from holdfast.errors import AlreadyExists, NotInitialised, Refused
from holdfast.fs import calls
from holdfast.fs.directory import resolved
from holdfast.issues.tracker import Tracker
from holdfast.locks.file_lock import DEFAULT_TIMEOUT
from holdfast.locks.retry import RetryConfig
from holdfast.repository.locating import find_records, git_home_around, git_home_of, is_git_home, main_checkout_of
from holdfast.store.open import open_store, read_config, write_config

ISSUES = ".jit"
COMMITTED = ("index.json", "events.jsonl")  # in it; ignored files stay when a branch without it is checked out
MARKS = (ISSUES, ".holdfast")  # the entries that mark the root of a tracker: its files, or the address of its store


def find_root(start: Path) -> Path:
    """The nearest directory upwards, from `start` on, that has an issue tracker; else `NotInitialised`. Anywhere in
    a git home, that is its root or its main checkout."""
    for mark in MARKS:
        found = _find(start, partial(_has, mark), partial(_has_or_names, mark))
        if found is not None:
            return tracker_of(Path(found))
    raise NotInitialised(f"there is no issue tracker in {start}, nor above it", path=str(start))


def _find(start: Path, has: Callable[[str], bool], near_git: Callable[[str], bool]) -> str | None:
    """The nearest directory upwards that has a tracker. In a git checkout, the tracker may be in the git home, to
    which `near_git` applies."""
    here = resolved(start)
    found = calls.find_upwards(here, lambda each: has(each) or _has(".git", each))
    return find_records(str(here), near_git) if found is not None and _has(".git", found) else found


def tracker_of(root: Path) -> Path:
    """The directory of the tracker of a repository: its root, or the main checkout of a git home that has it there."""
    main = None if calls.exists(root / ISSUES) else main_checkout_of(str(root))
    if main is not None and any(calls.exists(os.path.join(main, ISSUES, name)) for name in COMMITTED):
        return Path(main)
    if main is not None and read_config(root).issues_in_tree:
        message = f"the tracker is in the main checkout, {main}, but the branch there has no .jit/"
        raise NotInitialised(message, create="holdfast issue init --in-tree", path=main)
    return root


def place_for_tracker(start: Path, *, in_tree: bool = False) -> Path:
    """Where to create a tracker: in the git home around a directory, else in the directory itself. With `in_tree`, in
    the main checkout of the git home, which the configuration then names as the only place of the tracker."""
    home = git_home_around(str(resolved(start)))
    if not in_tree:
        return start if home is None else tracker_of(Path(home))
    main = None if home is None else main_checkout_of(home)
    if home is None or main is None:
        hint = "Adopt a checkout first ('holdfast init' in it), or leave out --in-tree."
        raise Refused(f"{start} is not in a git repository with an adopted main checkout", hint=hint)
    if calls.exists(os.path.join(home, ISSUES)):
        hint = "It serves every worktree. To move it, export its issues and import them."
        raise AlreadyExists(f"a tracker already exists in {home}", hint=hint, path=home)
    write_config(home, msgspec.structs.replace(read_config(home), issues_in_tree=True))
    return Path(main)


def _has(mark: str, directory: str) -> bool:
    return calls.exists(os.path.join(directory, mark))


def _has_or_names(mark: str, directory: str) -> bool:
    """Whether a directory has a tracker, or is a git home whose main checkout should have it."""
    if _has(mark, directory):
        return True
    return mark == ISSUES and is_git_home(directory) and read_config(directory).issues_in_tree


def open_tracker(
    root: str | os.PathLike[str],
    *,
    actor: str,
    address: str | None = None,
    timeout: float | None = DEFAULT_TIMEOUT,
    retry: RetryConfig | None = None,
    start: str | os.PathLike[str] | None = None,
) -> Tracker:
    """The issue tracker of the directory `root`, or at `address`. `actor` is the actor of every change, such as
    `agent:alice`. A new tracker must be initialised first. Checkers run in `root`; in a git home, in the checkout
    around `start`, else in the main one."""
    store, path = open_store(root, address, timeout=timeout), resolved(root)
    checked = partial(_checked_directory, path, path if start is None else start)
    return Tracker(store, actor=actor, root=path, checked=checked, retry=retry, skew=store.skew)


def _checked_directory(root: Path, start: str | os.PathLike[str]) -> Path:
    home = str(root) if is_git_home(str(root)) else git_home_of(str(root))
    if home is None:
        return root
    around = calls.find_upwards(resolved(start), lambda directory: git_home_of(directory) == home)
    return Path(around or main_checkout_of(home) or root)
