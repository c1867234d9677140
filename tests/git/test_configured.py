"""Programs that a repository's own configuration names: found, approved, refused."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import pytest

from holdfast.errors import Failure, NotApproved, Refused
from holdfast.git import configured
from holdfast.git.program import Git
from holdfast.repository import git_init
from holdfast.repository.git_init import adopt_checkout
from holdfast.repository.repository import Repository
from proof import effort
from tests.repository.stages import put_files
from tests.support.homes import SAFE, approve_programs, git

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="filters are POSIX commands")

FILTER = {"filter.up.clean": "tr a-z A-Z", "filter.up.smudge": "tr A-Z a-z"}


@pytest.fixture
def top(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(git_init, "require_safe", lambda directory, records_elsewhere: SAFE)
    path = tmp_path / "project"
    git("init", "-q", "-b", "trunk", path)
    put_files(path, {".gitattributes": "*.up filter=up\n", "a.up": "text\n"})
    git("add", "-A", at=path)
    git("commit", "-qm", "first", at=path)
    return path


def configure(top: Path, **settings: str) -> None:
    for key, value in settings.items():
        git("config", key, value, at=top)


def names(top: Path) -> list[str]:
    return [each.key for each in Git(top / ".git").programs()]


def test_filters_that_are_there_when_a_checkout_is_adopted_work(top: Path) -> None:
    configure(top, **FILTER)
    with pytest.raises(NotApproved, match=r"filter.up.clean = tr a-z A-Z"):
        adopt_checkout(top)
    assert not (top / ".git/holdfast").exists()
    made = adopt_checkout(top, agree=lambda programs: None)
    assert made.programs == tuple(f"{key} = {value}" for key, value in FILTER.items())
    (top / "a.up").write_text("other\n")
    with Repository(top) as repository, repository.lease("main") as lease:
        taken = repository.snapshot("main", lease)
        repository.snapshots.export(taken.snapshot_id, top.with_name("exported"))
    assert git("show", f"refs/holdfast/snapshots/{taken.snapshot_id}:a.up", at=top) == "OTHER"
    assert (top.with_name("exported") / "a.up").read_text() == "other\n"


def test_a_new_or_changed_program_is_refused_until_it_is_approved(top: Path) -> None:
    root = adopt_checkout(top).root
    repository = Git(top / ".git")
    repository.run("rev-parse", "HEAD")
    configure(top, **FILTER)
    with pytest.raises(NotApproved, match=r"filter.up.clean = tr a-z A-Z") as refused:
        repository.run("rev-parse", "HEAD")
    assert f"holdfast trust --repo {root}" in str(refused.value.hint)
    approve_programs(top)
    repository.run("rev-parse", "HEAD")
    configure(top, **{"filter.up.clean": "cat"})
    with pytest.raises(NotApproved, match=r"filter.up.clean = cat"):
        repository.run("rev-parse", "HEAD")
    configure(top, **{"filter.up.clean": FILTER["filter.up.clean"], "user.name": "somebody else"})
    repository.run("rev-parse", "HEAD")


def test_programs_are_found_wherever_they_are(top: Path) -> None:
    git("worktree", "add", "-q", "../linked", at=top)
    (top / "shared.config").write_text('[include]\npath = further.config\n[diff "x"]\ntextconv = cat\n')
    (top / "further.config").write_text("[core]\nsshCommand = mine\n")
    (top / ".git/config.worktree").write_text("[filter.dotted]clean=cat\n")
    (top / ".git/worktrees/linked/config.worktree").write_text('[credential "https://x"]\nhelper = mine\n')
    with (top / ".git/config").open("a") as file:
        file.write('[includeIf "onbranch:no-such-branch"]\n path = ../shared.config\n[merge "x"]\ndriver = mine\n')
    assert sorted(names(top)) == [
        "core.sshcommand",
        "credential.https://x.helper",
        "filter.dotted.clean",
        "merge.x.driver",
    ]


NEED_APPROVAL = {
    "hook.x.command": "harm", "hook.x.event": "reference-transaction", "hook.pre-commit.command": "harm",
    "fetch.bundleURI": "https://x", "transfer.bundleURI": "true", "bundle.x.uri": "https://x",
    "gc.recentObjectsHook": "harm", "http.proxy": "http://x", "http.https://x.sslVerify": "false",
    "http.saveCookies": "true", "lfs.storage": "/elsewhere", "lfs.url": "https://x", "remote.x.proxy": "http://x",
    "remote.x.url": "helper::x", "remote.x.pushurl": "helper::x", "url.helper::x.insteadOf": "y",
    "extensions.refStorage": "files:///elsewhere", "remote.x.lfsurl": "https://x",
}  # fmt: skip
NEED_NONE = {
    "http.https://x.extraheader": "AUTHORIZATION: a secret", "http.postBuffer": "1", "lfs.https://x.access": "basic",
    "lfs.repositoryFormatVersion": "0", "remote.x.url": "ssh://[2001:db8::1]/x", "remote.y.url": "u@x:y",
    "branch.x.merge": "refs/heads/x", "gitflow.branch.master": "main", "core.fsmonitor": "true",
    "branch.x.vscode-merge-base": "origin/main", "extensions.worktreeConfig": "true", "x.y": "a::b",
}  # fmt: skip


@pytest.mark.parametrize("key", NEED_APPROVAL)
def test_a_setting_that_starts_contacts_or_writes_something_needs_approval(key: str, top: Path) -> None:
    configure(top, **{key: NEED_APPROVAL[key]})
    assert [each.lower() for each in names(top)] == [key.lower()]


def test_settings_of_everyday_need_none(top: Path) -> None:
    configure(top, **NEED_NONE)
    assert names(top) == []


def test_a_directory_of_objects_elsewhere_needs_approval(top: Path) -> None:
    adopt_checkout(top)
    Git(top / ".git").run("rev-parse", "HEAD")
    (top / ".git/objects/info/alternates").write_text("# of a clone\n/elsewhere/objects\n")
    with pytest.raises(NotApproved, match="objects/info/alternates = /elsewhere/objects"):
        Git(top / ".git").run("rev-parse", "HEAD")


def test_the_password_in_an_address_is_not_shown(top: Path) -> None:
    configure(top, **{"http.proxy": "http://me:secret@proxy"})
    (found,) = Git(top / ".git").programs()
    assert found.shown == "http.proxy = http://...@proxy"


def test_our_own_merge_driver_needs_no_approval(top: Path) -> None:
    configure(top, **{"merge.holdfast.driver": configured.MERGE_DRIVER})
    assert names(top) == []


@pytest.mark.parametrize("text", ["[include]\npath = config\n", "[include]\npath = %(prefix)/x\n"])
def test_includes_that_cannot_be_followed_are_refused(top: Path, text: str) -> None:
    with (top / ".git/config").open("a") as file:
        file.write(text)
    with pytest.raises(Refused):
        names(top)


_SECTIONS = (
    *('[filter "a"]', "[FILTER.b]", '[merge "x"]', "[core]", "[include]", '[includeIf "x"]', "[lfs]", '[remote "o"]'),
    *(
        "[http]",
        "[credential]",
        "[protocol]",
        "[extensions]",
        "[user]",
        "[",
        "x",
        '[hook "h"]',
        "[bundle.b]",
        "[fetch]",
    ),
    *('[http "x"]', "[gc]", '[url "x:\\:y"]', '[url "x::"]'),
)
_KEYS = (
    *("clean", "smudge = x", "driver=y", "sshCommand = z", "path = /dev/null", "vcs", "cookieFile = c", "promisor"),
    *(
        "helper",
        "process=p",
        "allow = always",
        "partialClone = o",
        "standaloneTransferAgent = x",
        "name = x",
        "a = \\\n",
    ),
    *("command = x", "event = update", "uri = x", "bundleURI = x", "recentObjectsHook = x", "proxy = x", "lfsurl = x"),
    *("url = x::y", 'url = x:":"y', "url = x:\\\n:y", "insteadOf = x", "refStorage = files://x", "sslVerify = no"),
)
_BETWEEN = ("\n", " ", "", "\t", "\r\n", "# x\n", ";", '"', "\\\n", "\ufeff", "-", "x")


def test_a_configuration_without_a_suspicious_word_names_no_program(top: Path) -> None:
    """Random configurations: whatever git finds in one, a look at its bytes must not miss."""
    chance, path = random.Random(effort.SEED), top.parent / "config"
    texts = ['[filter "a"]\nclean = x\n']  # names a program whatever the seed is
    for _ in range(effort.rounds(2000, least=60)):
        pieces = (chance.choice(each) for each in (_SECTIONS, _BETWEEN, _KEYS, _BETWEEN) * chance.randrange(1, 4))
        texts.append("".join(pieces))
    found = 0
    for text in texts:
        path.write_text(text, newline="")
        try:
            listed = Git(top / ".git")._listed(path).decode().split("\0")
        except Failure:
            continue  # git reads nothing of it
        pairs = [each.partition("\n")[::2] for each in listed]
        judged = (configured._PROGRAMS.fullmatch, configured._INCLUDES.fullmatch)
        programs = [pair for pair in pairs if any(each(pair[0]) for each in judged) or configured._is_helped(*pair)]
        found += bool(programs)
        assert not programs or configured._SUSPICIOUS.search(path.read_bytes()), path.read_bytes()
    assert found
