"""Finding the repository and the worktree that a path is in, without opening either.

The guard asks before every write of an agent, so importing this module loads next to nothing.
"""

from __future__ import annotations

import os

from holdfast.fs import calls

TYPE_CHECKING = False  # checkers take it for true; importing `typing` costs time

if TYPE_CHECKING:
    from collections.abc import Callable


def find_repository_root(start: str) -> str | None:
    """The repository that a path is in: the nearest directory upwards with `.jvs/`, or the git home of the nearest
    checkout that is one; None if there is none."""
    found = calls.find_upwards(start, lambda here: calls.is_repository(here) or git_home_of(here) is not None)
    return None if found is None else found if calls.is_repository(found) else git_home_of(found)


def git_home_around(start: str) -> str | None:
    """The git home that a directory is in, unless a plain home is nearer."""
    found = find_repository_root(start)
    return found if found is not None and is_git_home(found) else None


def git_home_of(directory: str) -> str | None:
    """The root of the git home whose checkout or linked worktree has its top at this very directory; None if git does
    not know it there."""
    if not calls.exists(os.path.join(directory, ".git")):
        return None  # by far the most frequent case
    from holdfast.git.checkout import find_checkout, is_confirmed

    checkout = find_checkout(directory)
    root = None if checkout is None else root_in(checkout.common)
    return root if checkout is not None and root is not None and is_confirmed(checkout) else None


def root_in(common: str) -> str | None:
    """The root of the git home in the common directory of a git repository; None if there is none. A link does not
    count: it could lead to another repository."""
    root = os.path.join(common, "holdfast")
    return root if calls.is_directory(root) and calls.is_repository(root) else None


def is_git_home(root: str) -> bool:
    """Whether a repository is in the directory of a git repository."""
    common, name = os.path.split(root)
    return name == "holdfast" and calls.exists(os.path.join(common, "HEAD"))


def main_checkout_of(root: str) -> str | None:
    """The main checkout of a git home; None if it has none, or if this is a plain home."""
    if not is_git_home(root):
        return None
    from holdfast.git.checkout import main_checkout

    return main_checkout(os.path.dirname(root))


def main_worktree(root: str) -> str:
    """The name of the worktree that is the main checkout here."""
    if not is_git_home(root):
        return "main"
    from holdfast.git.checkout import checkout_name

    return checkout_name(os.path.dirname(root))


def find_records(start: str, has: Callable[[str], bool]) -> str | None:
    """The nearest directory upwards that has records of some kind; None if there is none. The records of a git home are
    in its root or in its main checkout, but never in the copy of a branch."""
    found: list[str] = []

    def is_found(directory: str) -> bool:
        root = git_home_of(directory)
        places = [directory] if root is None else [root, main_checkout_of(root)]
        found[:] = [place for place in places if place is not None and has(place)]
        return bool(found)

    calls.find_upwards(start, is_found)
    return found[0] if found else None


def git_worktree_at(directory: str, root: str) -> str | None:
    """The worktree of a git home that has its top at a directory; None if git does not register it there, or if
    Holdfast does not know it."""
    from holdfast.git.checkout import checkout_name, is_worktree_of, name_in

    checkout = is_worktree_of(directory, os.path.dirname(root))
    if checkout is None:
        return None
    return checkout_name(checkout.common) if checkout.git_dir == checkout.common else name_in(checkout.git_dir)
