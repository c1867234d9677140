"""Checkouts of git repositories, found as git finds them, but without starting git.

The guard asks before every write, so this module loads nothing but `holdfast.fs.calls`. Unlike git, it ignores the
environment: callers pass `GIT_DIR`.
"""

from __future__ import annotations

import os

from holdfast.fs import calls

TYPE_CHECKING = False  # true for type checkers; importing `typing` costs time

if TYPE_CHECKING:
    from typing import NamedTuple

    class Checkout(NamedTuple):
        """The work tree at `top` (None: a bare repository, or a place inside a git directory), its own git directory,
        and the one that all worktrees of the repository share. All paths are absolute, without symbolic links."""

        top: str | None
        git_dir: str
        common: str

else:
    from collections import namedtuple

    Checkout = namedtuple("Checkout", "top git_dir common")  # noqa: PYI024 - `typing` costs time

_MOST_OF_A_PATH = 1 << 16
_MOST_OF_A_CONFIG = 1 << 20
_NAME = "holdfast"
MAIN_CHECKOUT = ("holdfast", "checkout")
"""The file below the common directory with the path of a main checkout, if git itself does not record it."""
CLONE = ("holdfast", "clone")
"""The file below the common directory of a clone that has joined: the name of its checkout as a worktree, and on a
second line the identity of the clone."""
CLONE_OF = "holdfast"
"""The file in the `.git` of an isolated worktree that has the path of its registration in the repository."""


def find_checkout(start: str, git_dir: str | None = None) -> Checkout | None:
    """The checkout that contains `start`, which need not exist, or the one that `git_dir` (`GIT_DIR`) names."""
    if git_dir is not None:
        found = _git_directory(os.path.join(os.path.abspath(start), git_dir))
        return found and _with_top(*found)
    here = os.path.abspath(start)
    while True:
        if (found := _git_directory(os.path.join(here, ".git"))) is not None:
            return Checkout(calls.realpath(here), *found)
        if (found := _git_directory(here, may_be_file=False)) is not None:
            return Checkout(None, *found)
        above = os.path.dirname(here)
        if above == here:
            return None
        here = above


def is_confirmed(checkout: Checkout) -> bool:
    """Whether the git directory of a checkout is inside it, or leads back to it: any directory can have a `.git` file
    that leads to somebody else's repository."""
    if checkout.git_dir == checkout.common == os.path.join(checkout.top or "", ".git"):
        return True  # by far the most frequent case
    return checkout.top is not None and _with_top(checkout.git_dir, checkout.common).top == checkout.top


def name_in(git_dir: str) -> str | None:
    """The worktree's name that is recorded in the git directory of a linked worktree; None if there is none, or if no
    worktree can have that name."""
    try:
        name = calls.read_small(os.path.join(git_dir, _NAME), _MOST_OF_A_PATH, follow=False).decode().removesuffix("\n")
    except (OSError, UnicodeDecodeError):  # for a main checkout, this is the root's directory
        return None
    return name if name and "\0" not in name and "/" not in name else None


def checkout_name(common: str) -> str:
    """The name of the main checkout as a worktree: `main`, or its own in a clone that has joined."""
    return clone_in(common)[0]


def clone_in(common: str) -> tuple[str, str]:
    """The name and the identity of a clone that has joined; for any other, `main` and an empty string."""
    try:
        content = calls.read_small(os.path.join(common, *CLONE), _MOST_OF_A_PATH, follow=False).decode()
    except (OSError, UnicodeDecodeError):
        return "main", ""
    name, _, identity = content.partition("\n")
    is_name = name and "\0" not in name and "/" not in name
    return (name, identity.strip()) if is_name else ("main", "")


def main_checkout(common: str) -> str | None:
    """The directory of the main checkout; None if the repository is bare, if the directory is not recorded, or if the
    recorded one does not lead back."""
    settings = _core_settings(os.path.join(common, "config"))
    if settings.get("worktreeconfig") == "true":
        settings |= _core_settings(os.path.join(common, "config.worktree"))
    if worktree := settings.get("worktree"):  # a submodule, or a separate git directory
        return _leading_back(os.path.join(common, worktree), common)
    if settings.get("bare") == "true":
        return None
    if os.path.basename(common) == ".git":
        return os.path.dirname(common)
    noted = _first_line(os.path.join(common, *MAIN_CHECKOUT))  # `git init --separate-git-dir` leaves no trace in git
    return _leading_back(noted, common) if noted and os.path.isabs(noted) else None


def _leading_back(path: str, common: str) -> str | None:
    """The directory that a repository names as its checkout; None unless the `.git` in it leads to the repository,
    which could name any directory."""
    top = calls.realpath(path)
    found = _git_directory(os.path.join(top, ".git"))
    return top if found is not None and found[0] == calls.realpath(common) else None


def is_worktree_of(path: str, common: str) -> Checkout | None:
    """The checkout at `path` if it belongs to this repository in both directions: the `.git` in it leads to the
    repository, and the registration there leads back. Else None. `path` itself must not be a link."""
    found = _git_directory(os.path.join(path, ".git")) if calls.is_directory(path) else None
    if found is None or found[1] != calls.realpath(common):
        return None
    checkout = _with_top(*found)
    return checkout if checkout.top == calls.realpath(path) else None


def leads_back(clone: str, registered: str) -> str | None:
    """The registration that the `.git` directory `clone` of an isolated worktree names, if that leads to `registered`;
    else None. A link to such a directory does not count."""
    if not calls.is_directory(clone):
        return None
    try:
        named = os.fsdecode(calls.read_small(os.path.join(clone, CLONE_OF), _MOST_OF_A_PATH, follow=False)).rstrip("\n")
    except OSError:  # for a main checkout, this is the root's directory
        return None
    if not os.path.isabs(named) or "\0" in named or os.path.basename(os.path.dirname(named)) != "worktrees":
        return None
    back = _first_line(os.path.join(named, "gitdir"))
    if back is None or calls.realpath(os.path.join(named, back)) != calls.realpath(registered):
        return None
    return calls.realpath(named)


def _with_top(git_dir: str, common: str) -> Checkout:
    """The checkout that a git directory records as its own."""
    if git_dir == common:
        return Checkout(main_checkout(common), git_dir, common)
    if os.path.dirname(git_dir) != os.path.join(common, "worktrees"):
        return Checkout(None, git_dir, common)
    registered = _first_line(os.path.join(git_dir, "gitdir"))
    if registered is None:
        return Checkout(None, git_dir, common)
    return Checkout(calls.realpath(os.path.dirname(os.path.join(git_dir, registered))), git_dir, common)


def _git_directory(path: str, *, may_be_file: bool = True) -> tuple[str, str] | None:
    """The git directory at `path`, or the one that the file `path` names, and its common directory; else None."""
    if may_be_file and not calls.exists(path):
        return None  # by far the most frequent case
    if may_be_file and (named := _first_line(path)) is not None:
        if not named.startswith("gitdir: "):
            return None
        path = os.path.join(os.path.dirname(path), named.removeprefix("gitdir: "))
    if not calls.exists(os.path.join(path, "HEAD")):
        return None
    git_dir = leads_back(path, path) or calls.realpath(path)
    shared = _first_line(os.path.join(git_dir, "commondir"))
    common = git_dir if shared is None else calls.realpath(os.path.join(git_dir, shared))
    is_one = calls.is_directory(os.path.join(common, "refs")) and calls.exists(os.path.join(common, "objects"))
    return (git_dir, common) if is_one else None


def _first_line(path: str) -> str | None:
    """The path, of any bytes, that a file has as its only line; None if the file cannot be read or has a NUL."""
    try:
        content = calls.read_small(path, _MOST_OF_A_PATH)
    except OSError:
        return None
    return None if b"\0" in content else os.fsdecode(content).rstrip("\r\n")


def _core_settings(path: str) -> dict[str, str]:
    """`bare` and `worktree` of the section `core`, and `worktreeconfig` of `extensions`, in a configuration file.

    Like git, which reads these before anything else, this follows no `include`.
    """
    try:
        text = os.fsdecode(calls.read_small(path, _MOST_OF_A_CONFIG))
    except OSError:
        return {}
    settings: dict[str, str] = {}
    section = ""
    for line in map(str.strip, text.split("\n")):
        header, _, rest = line[1:].partition("]") if line.startswith("[") else ("", "", line)
        section = header.strip().lower() or section
        key, given, value = rest.partition("=")
        key = key.strip().lower()
        if (section, key) in (("core", "bare"), ("core", "worktree"), ("extensions", "worktreeconfig")):
            settings[key] = _value(value.strip()) if given else "true"
            if key != "worktree":
                settings[key] = "true" if settings[key].lower() in ("true", "yes", "on", "1") else "false"
    return settings


_ESCAPES = {"n": "\n", "t": "\t", "b": "\b"}


def _value(text: str) -> str:
    """A value without its quotes, escapes and comment."""
    found: list[str] = []
    is_quoted = False
    characters = iter(text)
    for each in characters:
        if each == "\\":
            escaped = next(characters, "")
            found.append(_ESCAPES.get(escaped, escaped))
        elif each == '"':
            is_quoted = not is_quoted
        elif each in "#;" and not is_quoted:
            return "".join(found).rstrip()
        else:
            found.append(each)
    return "".join(found)
