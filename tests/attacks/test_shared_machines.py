"""Other users of the machine: they learn nothing that a directory keeps to its owner, and root wedges nobody."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from proof.hostile.campaign import NOBODY
from proof.hostile.commands import facts_of
from proof.hostile.runner import Job, Runner
from proof.hostile.victim import Victim, make_victim, own, write
from tests.attacks.planting import head_of

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


@pytest.mark.sampled(1)
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


@pytest.mark.parametrize("shared", [None, "world"])
def test_other_users_cannot_read_snapshots_in_a_git_home_unless_git_shares_it(
    shared: str | None, git_victim: Victim, runner: Runner
) -> None:
    write(git_victim.place / f"private/{NAME}", CONTENT).chmod(0o600)
    (git_victim.place / "private").chmod(0o700)
    git_victim.base.parent.chmod(0o755)
    if shared is not None:
        _git(git_victim, 0, "config", "core.sharedRepository", shared)
    own(git_victim.base, OWNER)
    lines = ("snapshot -m x", "ref create it head", "worktree create made --from it")
    for line in lines:
        outcome = runner.run(as_user(git_victim.job(*line.split()), OWNER))
        assert outcome.status == 0, outcome
    name = f"refs/holdfast/snapshots/{head_of(git_victim)}:private/{NAME}"
    read = [_git(git_victim, user, "cat-file", "-p", name) for user in (OWNER, NOBODY)]
    assert read == [CONTENT, "" if shared is None else CONTENT]
    made = git_victim.worktree("made")
    assert (made / f"private/{NAME}").read_text() == CONTENT
    assert not [each for each in seen_by_others(made.parent.parent) if each.startswith(str(made))]


def _git(victim: Victim, user: int, *words: str) -> str:
    trusted = {"GIT_CONFIG_COUNT": "1", "GIT_CONFIG_KEY_0": "safe.directory", "GIT_CONFIG_VALUE_0": "*"}
    environment = victim.environment(trusted | {"HOME": "/nonexistent"})
    done = subprocess.run(
        ["git", *words], cwd=victim.place, env=environment, user=user, capture_output=True, text=True, check=False
    )
    return done.stdout


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


@pytest.mark.sampled(1)
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


@pytest.mark.sampled(1)
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


# --- A group that shares a repository ---------------------------------------------------------------

GROUP, ANNA, BEN = 5000, 12345, 12346
ALTERNATELY = (
    *("snapshot -m x", "worktree create {who}-made --from head", "lease acquire --name {who} --ttl 1s"),
    *("ref create {who}-ref head", "pin add head", "issue create {who}", "issue claim-next --ttl 1s", "gc plan"),
    *(
        "run --snapshot -m y -- install -m 664 /dev/null {who}-file",
        "restore head --inplace --reason x",
        "status",
        "who",
        "doctor",
    ),
    "worktree rename {who}-made {who}-other",
    *('ledger append {{"type":"note"}}', "ledger claim {node} --actor agent:{who} --ttl 10s"),
    *("ledger release {node} --actor agent:{who}", "history", "issue list", "worktree remove {other}-other --force"),
)
"""What two users do in turn; each line is run by both before the next one."""


def as_member(job: Job, user: int) -> Job:
    """A job of a member of the group, who keeps everything else private, or does not."""
    return job._replace(user=user, group=GROUP, umask=0o077 if user == ANNA else 0o002)


@pytest.fixture
def shared(tmp_path: Path, runner: Runner) -> Victim:
    """A repository that Anna has shared with a group."""
    base = Path(tempfile.mkdtemp(prefix="holdfast-"))
    victim = make_victim(base / "base")
    for each in (base, victim.base, victim.root):
        each.chmod(0o755)
    own(victim.home, ANNA)
    victim.home.chmod(0o777)
    os.chown(victim.root, ANNA, GROUP)
    for line in (
        "init --shared .",
        "issue init",
        "ledger init",
        "run --snapshot -m first -- install -m 664 /dev/null first",
    ):
        made = runner.run(as_member(victim.job(*line.split()), ANNA))
        assert made.status == 0, (line, made)
    return victim


def test_two_users_of_one_group_use_every_command_in_turn(shared: Victim, runner: Runner) -> None:
    names = {ANNA: "anna", BEN: "ben"}
    for line in ALTERNATELY:
        for user, other in ((ANNA, BEN), (BEN, ANNA)):
            words = line.format(who=names[user], other=names[other], node=user).split()
            outcome = runner.run(as_member(shared.job(*words), user))
            assert outcome.status in (0, 4), (names[user], words, outcome)
            assert not outcome.problem, (names[user], words, outcome)
    assert not seen_by_others(shared.root / ".jvs")


KILLED = (
    *("snapshot -m x", "issue create x", "ref create killed head", "worktree create killed --from head"),
    *("pin add head", "issue claim-next --ttl 1s"),
)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("line", KILLED)
def test_a_member_of_the_group_goes_on_after_another_was_killed_in_mid_commit(
    line: str, shared: Victim, runner: Runner
) -> None:
    """Anna keeps everything private by her umask; what she leaves must not be private all the same."""
    prepared = runner.run(as_member(shared.job("issue", "create", "one"), ANNA))
    job = shared.job(*line.split())._replace(call="proof.hostile.runner:die_in_commit")
    killed = runner.run(as_member(job, ANNA))
    assert (prepared.status, killed.status) == (0, -9), killed
    assert list((shared.root / ".holdfast/intents").iterdir()), "it was not killed in mid-commit"

    for each in ("snapshot -m y", "issue create y", "ref create later head", "worktree create later --from head"):
        outcome = runner.run(as_member(shared.job(*each.split()), BEN))
        assert outcome.status in (0, 4), (each, outcome)
        assert not outcome.problem, (each, outcome)


def test_a_member_of_the_group_collects_what_another_has_stored(shared: Victim, runner: Runner) -> None:
    for number in range(4):
        line = (
            "run",
            "--snapshot",
            "-m",
            "x",
            "--",
            "sh",
            "-c",
            f"mkdir -p d{number} && echo {number} >d{number}/file",
        )
        assert runner.run(as_member(shared.job(*line), ANNA)._replace(umask=0o002)).status == 0
    by_ben = [("gc", "policy", "--keep-last", "1"), ("gc", "plan", "--json")]
    planned = [runner.run(as_member(shared.job(*line), BEN)) for line in by_ben]
    plan = json.loads(planned[-1].out)["data"]["plan"]
    outcome = runner.run(as_member(shared.job("gc", "run", "--plan", plan), BEN))
    assert outcome.status == 0, outcome
    assert len(list((shared.root / ".jvs/snapshots").iterdir())) < 5


def test_the_doctor_of_root_gives_wrong_owners_back_and_closes_the_records_to_others(
    owned: Victim, runner: Runner
) -> None:
    jvs = owned.root / ".jvs"
    jvs.chmod(0o755)
    os.chown(jvs / "audit", 0, 0)
    secret = owned.home / "of-root"
    secret.write_text("not to be given away")
    os.chown(secret, 0, 0)
    os.link(secret, jvs / "audit/linked")
    by_owner = runner.run(as_user(owned.job("doctor", "--json"), OWNER))
    assert '"owner-wrong"' in by_owner.out, by_owner
    assert '"permissions-readable"' in by_owner.out, by_owner
    by_root = runner.run(owned.job("doctor", "--fix", "--json"))
    assert not by_root.problem, by_root
    assert ((jvs / "audit").stat().st_uid, jvs.stat().st_mode & 0o777) == (OWNER, 0o700)
    assert secret.stat().st_uid == 0, "a file with another name was given away"


def test_the_doctor_of_root_gives_a_wrong_group_back_in_a_shared_repository(shared: Victim, runner: Runner) -> None:
    jvs, secret = shared.root / ".jvs", shared.home / "elsewhere"
    wrong = [jvs / "audit", next(each for each in (jvs / "audit").iterdir() if each.is_file()), shared.root / ".jit"]
    secret.write_text("not to be given away")
    os.link(secret, jvs / "audit/linked")
    assert '"group-wrong"' in runner.run(as_member(shared.job("doctor", "--json"), BEN)).out  # of the linked file
    (jvs / "audit/linked").unlink()
    assert '"group-wrong"' not in runner.run(as_member(shared.job("doctor", "--json"), BEN)).out
    os.link(secret, jvs / "audit/linked")
    for each in wrong:
        os.chown(each, -1, GROUP + 1)

    found = json.loads(runner.run(as_member(shared.job("doctor", "--json"), ANNA)).out)["error"]["findings"]
    counts = {each["subject"]: each["facts"]["count"] for each in found if each["code"] == "group-wrong"}
    assert counts == {".jvs": 3, ".jit": 1}
    by_root = runner.run(shared.job("doctor", "--fix", "--json"))
    assert not by_root.problem, by_root
    assert {each.stat().st_gid for each in wrong} == {GROUP}
    assert {each.stat().st_mode & 0o2070 for each in (wrong[0], wrong[2])} == {0o2070}
    assert secret.stat().st_gid != GROUP, "a file with another name was given away"
    after = runner.run(as_member(shared.job("snapshot", "-m", "after"), BEN))
    assert after.status == 0, after
