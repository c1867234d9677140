"""Files that did not change, in directories that did: linked by a second process, or without it."""

from __future__ import annotations

import errno
import os
import time
from pathlib import Path
from typing import Any

import pytest

from holdfast.errors import ConsistencyUnavailable, IoFailure
from holdfast.fs import calls
from holdfast.fs.directory import write_all
from holdfast.trees import PAYLOAD, READY, Captured, Engine, capture, materialise, verify
from holdfast.trees.link_worker import LinkWorker, Order
from holdfast.trees.payload import Payload
from proof.interpose import Attempt, interposed
from tests.trees.groves import seen

DIRECTORIES, FILES = 12, 6


class Trees:
    """A source in which something changed in every directory since the first tree was captured of it."""

    def __init__(self, top: Path) -> None:
        self.top, self.source = top, top / "source"
        for number in range(DIRECTORIES):
            (self.source / f"d{number}").mkdir(parents=True)
            for name in range(FILES):
                (self.source / f"d{number}/f{name}").write_text(f"{number} {name}")
        time.sleep(0.05)
        self.first, _ = self.take(1)
        for number in range(DIRECTORIES):
            (self.source / f"d{number}/f0").write_text("changed")
        time.sleep(0.05)

    def take(self, number: int) -> tuple[Path, Captured]:
        tree, base = self.top / f"tree-{number}", self.top / f"tree-{number - 1}"
        return tree, capture(
            self.source,
            tree,
            engine=Engine.LINKED,
            base=base if number > 1 else None,
            cache=self.top / "cache",
            quiesced=True,
        )

    def require_linked(self, tree: Path, captured: Captured) -> None:
        """All that did not change is the same file in both trees."""
        assert list(verify(tree, captured.payload_hash)) == []
        for number in range(DIRECTORIES):
            for name in range(1, FILES):
                path = f"{PAYLOAD}/d{number}/f{name}"
                assert (tree / path).stat().st_ino == (self.first / path).stat().st_ino, path
            directory = tree / PAYLOAD / f"d{number}"
            assert directory.stat().st_mtime_ns == (self.source / f"d{number}").stat().st_mtime_ns


@pytest.fixture
def trees(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Trees:
    monkeypatch.setattr("holdfast.trees.capture_files._WORTH_A_PROCESS", 1)
    return Trees(tmp_path)


@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="there is no second processor")
def test_the_links_are_made_by_a_second_process(trees: Trees) -> None:
    linked: list[str] = []

    def note(attempt: Attempt) -> Any:
        linked.append(str(attempt.arguments[0]))
        return attempt.perform()

    with interposed(note, ("link",)):
        tree, captured = trees.take(2)

    assert [name for name in linked if name.startswith("f")] == []
    trees.require_linked(tree, captured)


@pytest.mark.parametrize(
    "program",
    [
        "raise SystemExit(1)",
        "import time; time.sleep(0.1)",
        "print('?')",
        "import os; os.kill(os.getpid(), 9)",
    ],
)
def test_without_that_process_there_are_links_all_the_same(
    trees: Trees, monkeypatch: pytest.MonkeyPatch, program: str
) -> None:
    monkeypatch.setattr("holdfast.trees.link_worker.PROGRAM", program)
    trees.require_linked(*trees.take(2))


def test_a_process_that_is_killed_in_the_middle_leaves_nothing_out(
    trees: Trees, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = (
        "import sys; sys.path.insert(0, sys.argv[1]); from holdfast.fs import calls; import os;"
        " from holdfast.trees import linking; link, made = calls.link, []\n"
        "def some(*a, **k):\n"
        "    made.append(a)\n"
        "    if len(made) > 20: os.kill(os.getpid(), 9)\n"
        "    link(*a, **k)\n"
        "calls.link = some; linking.serve(sys.argv[2:])"
    )
    monkeypatch.setattr("holdfast.trees.link_worker.PROGRAM", program)
    trees.require_linked(*trees.take(2))


def test_where_there_can_be_no_link_there_is_a_copy(trees: Trees, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: Any, **__: Any) -> None:
        raise OSError(errno.EMLINK, os.strerror(errno.EMLINK))

    monkeypatch.setattr("holdfast.trees.link_worker.PROGRAM", "raise SystemExit(1)")
    monkeypatch.setattr(calls, "link", refused)
    tree, captured = trees.take(2)

    assert list(verify(tree, captured.payload_hash)) == []
    materialise(tree, trees.top / "restored")
    assert seen(trees.top / "restored") == seen(trees.source)
    assert (tree / PAYLOAD / "d1/f1").stat().st_nlink == 1


def test_a_file_that_the_base_has_lost_is_copied_from_the_source(trees: Trees) -> None:
    (trees.first / PAYLOAD / "d3/f3").unlink()
    tree, captured = trees.take(2)
    assert list(verify(tree, captured.payload_hash)) == []


def test_a_file_that_the_base_has_lost_and_that_changes_meanwhile_fails_the_capture(
    trees: Trees, monkeypatch: pytest.MonkeyPatch
) -> None:
    from holdfast.trees.capture_files import Links

    (trees.first / PAYLOAD / "d3/f3").unlink()
    missing = Links.missing

    def later(self: Links) -> Any:
        (trees.source / "d3/f3").write_text("something else")
        return missing(self)

    monkeypatch.setattr(Links, "missing", later)
    with pytest.raises(ConsistencyUnavailable, match="d3/f3"):
        trees.take(2)
    assert not (trees.top / "tree-2" / READY).exists()


def test_a_full_disk_fails_the_capture(trees: Trees, monkeypatch: pytest.MonkeyPatch) -> None:
    link, made = calls.link, list[object]()

    def full(*arguments: Any, **options: Any) -> None:
        if len(made) > 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        made.append(arguments)
        link(*arguments, **options)

    monkeypatch.setattr("holdfast.trees.link_worker.PROGRAM", "raise SystemExit(1)")
    monkeypatch.setattr(calls, "link", full)
    with pytest.raises(IoFailure, match="No space left"):
        trees.take(2)
    assert not (trees.top / "tree-2" / READY).exists()


def test_a_capture_that_fails_leaves_no_process(trees: Trees, monkeypatch: pytest.MonkeyPatch) -> None:
    import subprocess

    started: list[subprocess.Popen[bytes]] = []
    popen = subprocess.Popen

    def noted(*arguments: Any, **options: Any) -> Any:
        started.append(popen(*arguments, **options))
        return started[-1]

    def broken(*_: Any, **__: Any) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(subprocess, "Popen", noted)
    monkeypatch.setattr("holdfast.trees.capture_files.copy_file", broken)
    with pytest.raises(IoFailure):
        trees.take(2)
    assert [each.poll() is not None for each in started] == [True] * len(started)


@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="there is no second processor")
@pytest.mark.parametrize("part", [0.0, 0.5, 0.99])
@pytest.mark.parametrize("failing", [1, 2])
def test_orders_that_do_not_arrive_are_carried_out_all_the_same(
    trees: Trees, monkeypatch: pytest.MonkeyPatch, failing: int, part: float
) -> None:
    """The process lives, but some of what was sent is lost, or torn."""
    count = 0

    def lossy(descriptor: int, content: bytes) -> None:
        nonlocal count
        count += 1
        if count == failing:
            write_all(descriptor, content[: int(len(content) * part)])
            raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
        write_all(descriptor, content)

    monkeypatch.setattr("holdfast.trees.link_worker._AT_ONCE", 4)
    monkeypatch.setattr("holdfast.trees.link_worker.write_all", lossy)
    tree, captured = trees.take(2)

    assert count >= failing
    trees.require_linked(tree, captured)


@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="there is no second processor")
def test_who_is_interrupted_leaves_no_process_behind(trees: Trees, monkeypatch: pytest.MonkeyPatch) -> None:
    processes: list[LinkWorker] = []

    def interrupted(self: LinkWorker) -> list[int]:
        processes.append(self)
        raise KeyboardInterrupt

    monkeypatch.setattr(LinkWorker, "failed", interrupted)
    with pytest.raises(KeyboardInterrupt):
        trees.take(2)
    assert [each._process.returncode is not None for each in processes] == [True]


# --- The times of directories ------------------------------------------------------------------------


class Nested:
    """Directories in directories, in all of which something changes; the lower ones are made later."""

    def __init__(self, top: Path) -> None:
        self.top, self.source, self.count = top, top / "source", 0
        for one in range(4):
            for two in range(3):
                (self.source / f"d{one}/e{two}").mkdir(parents=True)
        self.directories = sorted(path for path in self.source.rglob("*") if path.is_dir())
        for each in self.directories:
            for name in range(FILES):
                (each / f"f{name}").write_text(f"{each} {name}")
        self.directories[1].chmod(0o700)  # what lacks more than its time
        self.take()

    def take(self) -> Path:
        time.sleep(0.05)
        base = self.top / str(self.count) if self.count else None
        self.count += 1
        tree = self.top / str(self.count)
        options: dict[str, Any] = {"engine": Engine.LINKED, "base": base, "cache": self.top / "cache"}
        capture(self.source, tree, quiesced=True, **options)
        return tree

    def wrong(self) -> list[str]:
        """Directories of a tree in which everything has changed that have not the time of their source."""
        for each in self.directories:
            (each / "f0").write_text(f"changed {self.count}")
            os.utime(each, ns=(0, 10**18 + self.count))
        tree = self.take()
        return [
            str(path)
            for path in (each.relative_to(self.source) for each in self.directories)
            if (tree / PAYLOAD / path).stat().st_mtime_ns != (self.source / path).stat().st_mtime_ns
        ]


@pytest.fixture
def nested(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Nested:
    monkeypatch.setattr("holdfast.trees.capture_files._WORTH_A_PROCESS", 1)
    return Nested(tmp_path)


def test_directories_have_their_times_though_others_are_made_in_them_later(
    nested: Nested, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert nested.wrong() == []
    monkeypatch.setattr("holdfast.trees.link_worker.PROGRAM", "raise SystemExit(1)")
    assert nested.wrong() == []


@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="there is no second processor")
@pytest.mark.parametrize("program", ["", "raise SystemExit(1)"], ids=["made in later", "never carried out"])
def test_a_directory_that_is_taken_for_complete_too_long_is_found(
    nested: Nested, monkeypatch: pytest.MonkeyPatch, program: str
) -> None:
    """Planted: whatever happens, what was handed over counts as done."""

    class Stubborn(set[str]):
        def discard(self, element: object, /) -> None:
            pass

    def begin(self: Payload, *arguments: Any, **options: Any) -> None:
        make(self, *arguments, **options)
        self.complete = Stubborn()

    def give_and_wait(self: LinkWorker, order: Order) -> bool:
        given = give(self, order)
        self._send()
        time.sleep(0.05)
        return given

    make, give = Payload.__init__, LinkWorker.try_give
    monkeypatch.setattr(Payload, "__init__", begin)
    monkeypatch.setattr(LinkWorker, "try_give", give_and_wait)
    if program:
        monkeypatch.setattr("holdfast.trees.link_worker.PROGRAM", program)
    assert nested.wrong() != []
