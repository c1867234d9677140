"""The branch that work starts from and lands on: a local one, or one on a remote."""

from __future__ import annotations

import contextlib
from typing import NamedTuple

from holdfast.errors import GitFailed, NotFound, Refused
from holdfast.git import landing, transfer
from holdfast.git import worktrees as linked
from holdfast.git.program import Git
from holdfast.git.transfer import Remote
from holdfast.repository.context import has_several_clones
from holdfast.repository.git_snapshots import GitSnapshots
from holdfast.repository.landing_records import Landing, target_name
from holdfast.repository.settings import read_settings
from holdfast.store.model import Store


class LandingBranch(NamedTuple):
    """A branch that work lands on: a local one, or one on a remote."""

    git: Git
    branch: str
    name: str
    remote: Remote | None = None

    def tip(self) -> str:
        """The commit that the next candidate is built on; raises `NotFound` if there is no such branch."""
        if self.remote is not None:
            return transfer.fetch_branch(self.git, self.remote, self.branch, f"{landing.FETCHED}{self.name}")
        found = landing.tip_of(self.git, self.branch)
        if found is None:
            hint = f"Create it: 'git branch {self.branch}'. Or name another one: --into."
            raise NotFound(f"there is no branch {self.branch}", hint=hint, branch=self.branch)
        return found

    def push(self, old: str, new: str) -> bool:
        """Move the branch on the remote from `old` to `new`; return False if it has moved elsewhere meanwhile."""
        assert self.remote is not None
        try:
            transfer.push_branch(self.git, self.remote, self.branch, new, expected=old)
        except GitFailed:
            found = self.tip()
            if found == old:
                raise  # the remote does not allow it
            return landing.is_contained(self.git, new, found)
        return True

    def require(self, entry: Landing) -> None:
        """Fetch the commit of an entry that another machine has queued."""
        if self.remote is not None and not self.git.succeeds("cat-file", "-e", entry.commit):
            with contextlib.suppress(GitFailed):
                transfer.fetch_ref(self.git, self.remote, f"{landing.FROZEN}{entry.landing_id}")


def default_branch(home: GitSnapshots) -> str:
    """The branch that is checked out in the main checkout."""
    found = linked.current_branch(home.git, home.paths.payload(home.paths.main))
    if found is None:
        message = f"no branch is checked out in {home.paths.main}"
        raise Refused(message, hint="Name the branch to land on: --into BRANCH.")
    return found


def default_remote(home: GitSnapshots, store: Store) -> str | None:
    """The remote of the setting `land.push`. Without it, None; but if several clones share the records, they have only
    remote branches in common, so the remote of the checkout's branch, else `origin`."""
    chosen = read_settings(home.paths.root).push
    if chosen is not None or not has_several_clones(store):
        return chosen
    try:
        return remote_of(home, None).name
    except NotFound as failure:
        message = "several clones share this repository, so work lands on a remote, and this clone has none"
        raise Refused(message, hint=failure.hint) from failure


def remote_of(home: GitSnapshots, name: str | None) -> Remote:
    return transfer.remote_named(home.git, name, home.paths.payload(home.paths.main))


def landing_branch(home: GitSnapshots, store: Store, branch: str | None, remote: str | None) -> LandingBranch:
    """A branch to land on, by default the one that is checked out in the main checkout. Without a remote, it is the
    local branch, which must exist, and on which a clone of several cannot land."""
    branch = branch or default_branch(home)
    linked.require_branch_name(home.git, branch)
    if remote is None and has_several_clones(store):
        message = f"several clones share this repository, so work lands on the {branch} of a remote"
        raise Refused(message, hint="Name the remote: --push origin, or 'holdfast config set land.push origin'.")
    found = None if remote is None else remote_of(home, remote)
    target = LandingBranch(home.git, branch, target_name(branch, remote or ""), found)
    if found is None:
        target.tip()
    return target


def start_of_work(home: GitSnapshots, store: Store) -> str | None:
    """The commit that new work starts from, unless its author chooses another: the tip of the branch that it lands on
    by default. None: what is checked out in the main checkout, which is that tip if it is a local branch."""
    with contextlib.suppress(NotFound, Refused):  # no remote, no such branch there, or none checked out
        remote = default_remote(home, store)
        if remote is not None:
            return tip_to_start_from(landing_branch(home, store, None, remote))
    return None


def tip_to_start_from(target: LandingBranch) -> str:
    try:
        return target.tip()
    except GitFailed as failure:  # the remote is out of reach
        failure.hint = "To start from another commit: 'holdfast worktree create NAME --from COMMIT'."
        raise
