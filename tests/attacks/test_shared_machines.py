"""Other users of the machine: they learn nothing that a directory keeps to its owner, and root wedges nobody."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from proof.hostile.campaign import NOBODY
from proof.hostile.commands import facts_of
from proof.hostile.runner import Job, Runner
from proof.hostile.victim import Victim, own

OWNER = 12345
NAME, CONTENT = "name-of-a-private-file", "content of a private file"

if sys.platform != "linux" or os.geteuid() != 0:
    pytest.skip("needs root, to act as several users", allow_module_level=True)


def as_user(job: Job, user: int) -> Job:
    return job._replace(user=user)


@pytest.fixture
def owned(victim: Victim) -> Victim:
    """A victim whose files belong to a user without rights, with a private directory in a worktree."""
    private = victim.root / "main/private"
    private.mkdir()
    (private / NAME).write_text(CONTENT)
    private.chmod(0o700)
    victim.base.parent.chmod(0o755)
    own(victim.base, OWNER)
    return victim


def seen_by_others(top: Path) -> list[str]:
    """Every file below a directory that others may read, if they may enter the directories above it."""
    found = []
    for directory, names, files in os.walk(top):
        names[:] = [each for each in names if os.lstat(f"{directory}/{each}").st_mode & 0o005 == 0o005]
        found += [f"{directory}/{each}" for each in files if os.lstat(f"{directory}/{each}").st_mode & 0o004]
    return found


COMMANDS = (
    ("snapshot", "-m", "x"),
    ("worktree", "create", "made", "--from", "head"),
    ("restore", "v1", "--inplace", "--reason", "x"),
    ("status",),
    ("export", "head", "{out}/exported"),
)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_what_a_private_directory_contains_stays_private_after(
    command: tuple[str, ...], owned: Victim, runner: Runner
) -> None:
    first = runner.run(as_user(owned.job("snapshot", "-m", "first"), OWNER))
    assert first.status == 0, first
    line = [word.replace("{out}", str(owned.out)) for word in command]
    outcome = runner.run(as_user(owned.job(*line), OWNER))
    assert not outcome.problem, outcome

    for top in (owned.root / ".jvs", owned.root / ".holdfast"):
        for path in seen_by_others(top):
            assert NAME.encode() not in Path(path).read_bytes(), f"others read the name in {path}"
            assert NAME not in path, f"others see the name {path}"
            assert CONTENT.encode() not in Path(path).read_bytes(), f"others read the content in {path}"


WRITERS: dict[str, Callable[[Victim], tuple[str, ...]]] = {
    "a lease": lambda victim: ("lease", "acquire", "--ttl", "1s"),
    "a snapshot": lambda victim: ("snapshot", "-m", "by root"),
    "a worktree": lambda victim: ("worktree", "create", "made", "--from", "head"),
    "an issue": lambda victim: ("issue", "create", "by root"),
    "a claim": lambda victim: ("issue", "claim-next", "--ttl", "5s"),
    "an event": lambda victim: ("ledger", "append", '{"type":"note"}'),
    "a claim of the ledger": lambda victim: ("ledger", "claim", "1.7", "--actor", "agent:root", "--ttl", "1s"),
    "a plan": lambda victim: ("gc", "plan"),
    "a repair": lambda victim: ("doctor", "--fix"),
    "a policy": lambda victim: ("gc", "policy", "--keep-last", "3"),
}
LATER = (
    *(("snapshot", "-m", "later"), ("worktree", "create", "later", "--from", "head"), ("issue", "create", "later")),
    *(("ledger", "append", '{"type":"note"}'), ("gc", "plan"), ("gc", "policy", "--keep-last", "4"), ("status",)),
)


TOUCHING = (
    *("worktree remove made --force", "worktree rename made other", "lease acquire --worktree made --ttl 1s"),
    *("issue update {new} --title x", "issue delete {new}", "issue release {third}", "gc run --plan {plan}"),
    *(
        "ledger release 1.7 --actor agent:root",
        "ref delete v1",
        "pin remove {pin}",
        "restore head --inplace --reason x",
    ),
)
"""What the owner does to what root has made; it may be refused, but must not end in the middle."""


@pytest.mark.sampled(3)
@pytest.mark.parametrize("what", WRITERS)
def test_the_owner_goes_on_after_root_has_made(what: str, owned: Victim, runner: Runner) -> None:
    facts = facts_of(owned)
    known = {each.stem for each in (owned.root / ".jit/issues").glob("*.json")}
    by_root = runner.run(owned.job(*WRITERS[what](owned)))
    new = {each.stem for each in (owned.root / ".jit/issues").glob("*.json")} - known
    facts |= {"new": min(new, default="none"), "third": facts["second"]}
    touched = [[word.format(**facts) if "{" in word else word for word in line.split()] for line in TOUCHING]
    touching = [runner.run(as_user(owned.job(*line), OWNER)) for line in touched]
    later = [runner.run(as_user(owned.job(*each), OWNER)) for each in LATER]

    assert not [each for each in (by_root, *touching) if each.problem]
    failed = [each for each in later if each.status not in (0, 4) or each.problem]  # 4: root's lease has not expired
    assert not failed, failed[0]


FIRST = {
    ".jvs/refs": ("ref create one head", "ref create two head"),
    ".jvs/pins": ("pin add head", "pin add v1"),
    ".jvs/plans": ("gc plan", "gc plan"),
    ".jvs/queues": ("lease acquire --worktree side --wait 1ms", "lease acquire --worktree side --wait 1ms"),
    ".jvs/operations": ("worktree remove open --force --no-snapshot", "worktree remove spare --force --no-snapshot"),
    ".jvs/tokens": ("lease acquire --worktree spare --ttl 1s", "lease acquire --ttl 1s"),
    ".jvs/tmp": ("snapshot -m root", "snapshot -m user"),
    ".jvs/remnants": ("gc run --plan {plan}", "gc plan"),
    ".jit/claims": ("issue claim-next --ttl 5s", "issue claim {second} --ttl 5s"),
    ".jit/dependents": ("issue create a --depends-on {issue}", "issue create b --depends-on {second}"),
    ".jit/gate-runs": ("gate check {second} tests", "gate check {second} tests"),
    ".holdfast": ("ref create one head", "ref create two head"),
    ".jvs/audit": ("ref create one head", "ref create two head"),
}
"""Directories that the first command to need them makes: what root does, and then the owner."""


@pytest.mark.sampled(4)
@pytest.mark.parametrize("directory", FIRST)
def test_the_owner_goes_on_after_root_has_made_the_directory(directory: str, owned: Victim, runner: Runner) -> None:
    """A commit that is decided, and that the owner cannot carry out, would block everything after it."""
    facts, (by_root, by_owner) = facts_of(owned), FIRST[directory]
    shutil.rmtree(owned.root / directory, ignore_errors=True)
    made = runner.run(owned.job(*(word.format(**facts) for word in by_root.split())))
    then = runner.run(as_user(owned.job(*(word.format(**facts) for word in by_owner.split())), OWNER))
    later = [runner.run(as_user(owned.job(*each), OWNER)) for each in LATER]

    assert not [each for each in (made, then) if each.problem]
    failed = [each for each in later if each.status not in (0, 4) or each.problem]
    assert not failed, failed[0]


def test_another_user_without_rights_gets_a_failure_and_changes_nothing(owned: Victim, runner: Runner) -> None:
    for line in (
        ("who",),
        ("info",),
        ("snapshot", "-m", "x"),
        ("doctor", "--fix"),
        ("issue", "list"),
        ("guard", "main/top"),
    ):
        outcome = runner.run(as_user(owned.job(*line), NOBODY))
        assert not outcome.problem, (line, outcome)
