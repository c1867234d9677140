"""The identity and the liveness of a holder, which is dead only if that is certain."""

from __future__ import annotations

import ctypes
import json
import os
import pwd
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.locks import identity
from holdfast.locks.identity import Holder, Liveness, current_holder, liveness, process_liveness
from proof.effort import rounds
from tests.locks.lock_watch import become_nobody, linux_only
from tests.locks.workers import PATIENCE, Line, Worker, Workers, wait_until

if sys.platform == "win32":
    pytest.skip("needs fork", allow_module_level=True)

ALIVE, DEAD, UNKNOWN = Liveness.ALIVE, Liveness.DEAD, Liveness.UNKNOWN


def report_holder_and_wait(line: Line) -> None:
    """Task for a worker: report its own identity and wait."""
    line.say(current_holder())
    line.wait()


def start_holder(workers: Workers) -> tuple[Worker, Holder]:
    """Start a process; returns it with the identity that it reports."""
    worker = workers.start(report_holder_and_wait)
    holder = worker.hear()
    assert isinstance(holder, Holder)
    return worker, holder


# --- Identity -----------------------------------------------------------------------------------------


def test_a_holder_is_identified_by_host_user_pid_and_start_time() -> None:
    me = current_holder()

    user = pwd.getpwuid(os.getuid()).pw_name
    assert me.holder_id == f"{os.uname().nodename}:{user}:{os.getpid()}:{me.start_time}"
    assert len(me.holder_id.split(":")) == 4
    if sys.platform == "linux":
        assert re.fullmatch(r"[0-9]+", me.start_time)
        assert me.boot_id == Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def test_a_holder_stays_the_same_for_the_life_of_its_process() -> None:
    first = current_holder()
    time.sleep(0)

    assert current_holder() == first


def test_a_holder_survives_a_round_trip_through_its_record() -> None:
    me = current_holder()

    record = json.loads(json.dumps(me.as_record()))

    assert set(record) == {"holder_id", "boot_id", "machine_id", "pid_namespace"}
    assert Holder.from_record(record) == me
    assert Holder.from_record({**record, "purpose": "something else that is stored there"}) == me


def test_the_record_does_not_reveal_the_confidential_machine_id() -> None:
    secret = Path("/etc/machine-id")
    if not secret.exists():
        pytest.skip("there is no /etc/machine-id")

    assert secret.read_text().strip() not in json.dumps(current_holder().as_record())


def test_a_forked_child_is_a_holder_of_its_own(workers: Workers) -> None:
    parent = current_holder()

    worker, child = start_holder(workers)

    assert child.pid == worker.pid != parent.pid
    assert child._replace(pid=0, start_time="") == parent._replace(pid=0, start_time="")
    assert liveness(child) is ALIVE


def test_a_user_without_a_name_is_identified_by_number(workers: Workers) -> None:
    if os.getuid() != 0:
        pytest.skip("changing the user needs root")

    def become_unknown(line: Line) -> None:
        os.setuid(54321)
        line.say(current_holder().user)

    assert workers.start(become_unknown).hear() == "54321"


GARBAGE = [
    {},
    {"holder_id": None},
    {"holder_id": 5},
    {"holder_id": ""},
    {"holder_id": "host:user:12"},
    {"holder_id": "host:user:12:34:56"},
    {"holder_id": "host:user:pid:34"},
    {"holder_id": "host:user:-1:34"},
    {"holder_id": "host:user:1.5:34"},
    {"holder_id": "host:user:٣:34"},
    {"holder_id": "host:user:" + "9" * 5000 + ":34"},
    {"holder_id": ["host", "user", 1, 2]},
    {"pid": 12, "host": "host"},
]


@pytest.mark.parametrize("record", GARBAGE, ids=lambda record: json.dumps(record)[:40])
def test_a_record_without_a_valid_holder_id_gives_no_holder(record: dict[str, object]) -> None:
    assert Holder.from_record(record) is None


scalars = st.none() | st.booleans() | st.integers() | st.text(max_size=20)
holder_ids = st.tuples(st.text(max_size=5), st.text(max_size=5), st.integers(), scalars).map(
    lambda parts: ":".join(str(part) for part in parts)
)


@settings(deadline=None, max_examples=rounds(100, least=5))
@given(
    st.fixed_dictionaries(
        {},
        optional={
            "holder_id": holder_ids | scalars,
            "boot_id": scalars,
            "machine_id": scalars,
            "pid_namespace": scalars,
        },
    )
)
def test_no_record_makes_the_liveness_check_fail_or_answer_dead(record: dict[str, object]) -> None:
    holder = Holder.from_record(record)

    assert holder is None or liveness(holder) in (UNKNOWN, ALIVE)


@pytest.mark.parametrize("value", [None, 5, [], "", "another"], ids=repr)
@pytest.mark.parametrize("field", ["boot_id", "pid_namespace"])
def test_a_holder_with_a_damaged_field_is_not_judged_dead(field: str, value: object) -> None:
    me = current_holder()
    record = {**me.as_record(), field: value, "machine_id": "" if value == "another" else me.machine_id}

    holder = Holder.from_record(record)

    assert holder is not None
    if getattr(me, field):
        assert liveness(holder) is UNKNOWN


# --- Processes of this machine ------------------------------------------------------------------------


def test_a_process_is_alive_until_it_has_ended(workers: Workers) -> None:
    worker, holder = start_holder(workers)
    assert liveness(holder) is ALIVE

    worker.kill()
    worker.wait()

    assert liveness(holder) is DEAD


def test_a_stopped_process_is_alive(workers: Workers) -> None:
    worker, holder = start_holder(workers)

    worker.stop()

    assert liveness(holder) is ALIVE


def test_a_zombie_is_dead(workers: Workers) -> None:
    worker, holder = start_holder(workers)

    worker.kill()

    wait_until(lambda: (seen := identity.find_process(worker.pid)) is not None and seen.is_zombie)
    assert liveness(holder) is DEAD
    assert identity.process_exists(worker.pid), "its pid is not free yet"
    worker.wait()
    assert liveness(holder) is DEAD


@linux_only
def test_a_process_whose_main_thread_has_ended_is_alive_while_others_run(workers: Workers) -> None:
    exit_thread = {"x86_64": 60, "aarch64": 93}.get(os.uname().machine)
    if exit_thread is None:
        pytest.skip(f"the syscall number of exit is not known for {os.uname().machine}")

    def end_the_main_thread(line: Line) -> None:
        line.say(current_holder())
        end = threading.Event()

        def go_on() -> None:
            end.wait()
            line.wait()
            os._exit(0)

        threading.Thread(target=go_on).start()
        end.set()
        ctypes.CDLL(None).syscall(exit_thread, 0)

    worker = workers.start(end_the_main_thread)
    holder = worker.hear()
    wait_until(lambda: " Z " in Path(f"/proc/{worker.pid}/stat").read_text())

    assert liveness(holder) is ALIVE
    worker.say("end")
    wait_until(lambda: liveness(holder) is DEAD)


@linux_only
@pytest.mark.parametrize("name", ["plain", "with blanks", ") Z 1 2 3 (", "a)b(c) R", "\n\t"])
def test_the_name_of_a_process_cannot_falsify_its_state(name: str, workers: Workers) -> None:
    def rename_and_wait(line: Line) -> None:
        Path("/proc/self/comm").write_text(name)
        report_holder_and_wait(line)

    worker = workers.start(rename_and_wait)
    holder = worker.hear()

    found = identity.find_process(worker.pid)

    assert found is not None
    assert (found.start_time, found.is_zombie) == (holder.start_time, False)
    assert liveness(holder) is ALIVE


def test_another_process_with_the_same_pid_is_not_the_holder() -> None:
    me = current_holder()
    earlier = me._replace(start_time="1" if sys.platform == "linux" else "1.00")

    assert liveness(earlier) is DEAD
    assert process_liveness(me.pid, start_time=earlier.start_time) is DEAD
    assert process_liveness(me.pid, start_time=me.start_time) is ALIVE
    assert process_liveness(me.pid) is ALIVE, "without a start time, only the pid can be compared"


@pytest.mark.parametrize("pid", [0, -1, 1 << 31, 1 << 70])
def test_the_liveness_of_an_impossible_pid_is_unknown(pid: int) -> None:
    assert process_liveness(pid) is UNKNOWN


def test_a_process_of_another_user_that_cannot_be_signalled_is_alive(workers: Workers) -> None:
    def look_at_the_first_process(line: Line) -> None:
        become_nobody()
        try:
            os.kill(1, 0)
        except PermissionError:
            line.say(("EPERM", process_liveness(1), identity.process_exists(1)))
        else:
            line.say(("permitted", process_liveness(1), identity.process_exists(1)))

    permission, alive, exists = workers.start(look_at_the_first_process).hear()

    assert permission == "EPERM"
    assert alive is ALIVE
    assert exists


# --- Other machines and other boots -------------------------------------------------------------------

HERE = Holder("host", "user", 100, "5000", "boot-1", "machine-1", "namespace-1")


@pytest.mark.parametrize(
    ("holder", "expected"),
    [
        (HERE._replace(host="other"), UNKNOWN),
        (HERE._replace(host="other", machine_id="", boot_id=""), UNKNOWN),
        (HERE._replace(boot_id="boot-0"), DEAD),
        (HERE._replace(boot_id="boot-0", pid_namespace="namespace-0"), DEAD),
        (HERE._replace(boot_id="boot-0", machine_id="machine-2"), UNKNOWN),
        (HERE._replace(boot_id="boot-0", machine_id=""), UNKNOWN),
        (HERE._replace(boot_id=""), UNKNOWN),
        (HERE._replace(pid_namespace="namespace-2"), UNKNOWN),
        (HERE._replace(pid_namespace=""), UNKNOWN),
    ],
    ids=[
        "another host",
        "another host without ids",
        "the same machine, rebooted",
        "the same machine, rebooted, another namespace",
        "another machine of the same name",
        "a machine of the same name without an id",
        "a machine without a boot id",
        "another pid namespace",
        "an unknown pid namespace",
    ],
)
def test_a_holder_elsewhere_is_dead_only_if_the_same_machine_was_rebooted(
    holder: Holder, expected: Liveness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(identity, "find_process", lambda _: pytest.fail("a pid means nothing there"))

    assert liveness(holder, here=HERE) is expected


def test_a_holder_on_a_machine_of_the_same_name_is_unknown_if_neither_has_an_id() -> None:
    anonymous = HERE._replace(boot_id="boot-0", machine_id="")

    assert liveness(anonymous, here=HERE._replace(machine_id="")) is UNKNOWN


def test_a_holder_from_before_a_reboot_is_dead() -> None:
    me = current_holder()
    if not (me.boot_id and me.machine_id):
        pytest.skip("this system has no machine id or no boot id")

    assert liveness(me._replace(boot_id="00000000-0000-0000-0000-000000000000")) is DEAD
    assert liveness(me._replace(boot_id="0", machine_id="another")) is UNKNOWN


# --- Real namespaces ----------------------------------------------------------------------------------

REPORT_HOLDER = """
import json, os, sys
from holdfast.locks.identity import Holder, current_holder, liveness
me = current_holder()
child = os.fork()
if child == 0:
    print(json.dumps({**me.as_record(), "as seen from inside": liveness(me).value}), flush=True)
    os._exit(0)
os.waitpid(child, 0)
sys.stdin.read()
"""


def have_unshare() -> str:
    """The path of unshare(1); skips the test if it cannot be used."""
    program = shutil.which("unshare")
    if program is None or os.getuid() != 0:
        pytest.skip("namespaces need unshare(1) and root")
    return program


@contextmanager
def elsewhere(*how: str, program: str = REPORT_HOLDER) -> Iterator[str]:
    """Run a Python program in other namespaces until the end of the block; yields its first line of output."""
    command = [have_unshare(), *how, sys.executable, "-c", program]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as running:
        assert running.stdin is not None
        assert running.stdout is not None
        assert running.stderr is not None
        said = running.stdout.readline()
        if not said:
            problem = running.stderr.read().strip()
            if "Traceback" not in problem or "returned non-zero exit status" in problem:
                pytest.skip(f"cannot create such a namespace here: {problem.splitlines()[-1:]}")
            pytest.fail(problem)
        yield said
        running.stdin.close()
        assert running.wait(PATIENCE) == 0, running.stderr.read()


@linux_only
@pytest.mark.parametrize("how", [["-pf", "--mount-proc"], ["-pf"]], ids=["with its own /proc", "with ours"])
def test_a_process_in_another_pid_namespace_is_unknown_here_and_alive_there(
    how: list[str],
) -> None:
    with elsewhere(*how) as said:
        record = json.loads(said)
        holder = Holder.from_record(record)

        assert holder is not None
        assert holder.host == current_holder().host
        assert holder.boot_id == current_holder().boot_id
        assert holder.pid == 1
        assert liveness(holder) is UNKNOWN
        assert record["as seen from inside"] == "alive"


@linux_only
def test_a_process_in_another_time_namespace_is_unknown_and_not_dead() -> None:
    with elsewhere("-T", "--boottime", "100000") as said:
        holder = Holder.from_record(json.loads(said))

        assert holder is not None
        assert liveness(holder) is UNKNOWN


@linux_only
def test_a_holder_id_has_four_fields_even_if_the_host_name_has_a_colon() -> None:
    program = """
import socket
socket.sethostname("a:b")
from holdfast.locks.identity import Holder, current_holder, liveness
me = current_holder()
print(me.holder_id.count(":"), Holder.from_record(me.as_record()) == me, liveness(me).value, flush=True)
"""
    with elsewhere("-u", program=program) as said:
        assert said == "3 True alive\n"


@linux_only
def test_without_a_proc_file_system_no_holder_is_judged_dead() -> None:
    program = """
import os, subprocess
subprocess.run(["umount", "-l", "/proc"], check=True)
from holdfast.locks.identity import current_holder, liveness
me = current_holder()
print(liveness(me).value, liveness(me._replace(pid=(1 << 22) - 1)).value, flush=True)
"""
    with elsewhere("-m", program=program) as said:
        assert said == "unknown unknown\n"


@linux_only
def test_a_process_hidden_from_this_user_is_alive() -> None:
    program = """
import os, subprocess, sys
from holdfast.locks.identity import process_liveness
import holdfast.fs.durable
subprocess.run(["mount", "-t", "proc", "-o", "hidepid=2", "proc", "/proc"], check=True)
gone = subprocess.Popen(["true"])
gone.wait()
os.setgroups([]); os.setgid(65534); os.setuid(65534)
hidden = not os.path.exists("/proc/1")
print(hidden, process_liveness(1).value, process_liveness(gone.pid).value, flush=True)
"""
    with elsewhere("-m", program=program) as said:
        assert said == "True alive dead\n"


PID_REUSE = """
import json, os, time
from holdfast.locks.identity import Holder, current_holder, liveness

def reuse_pid(number):
    "Make the kernel give this pid to the next process."
    with open("/proc/sys/kernel/ns_last_pid", "w") as file:
        file.write(str(number - 1))

def wait_for_another_tick(holder):
    "Start times have a resolution of a hundredth of a second."
    while time.clock_gettime(time.CLOCK_BOOTTIME) < int(holder.start_time) / 100 + 0.05:
        pass

def send_holder(pipe):
    os.write(pipe, json.dumps(current_holder().as_record()).encode())

def receive_holder(pipe):
    return Holder.from_record(json.loads(os.read(pipe, 4096)))

ours, theirs = os.pipe()
wait, go = os.pipe()
"""


@linux_only
def test_a_pid_that_the_kernel_really_reuses_does_not_revive_the_holder() -> None:
    program = """
def start():
    pid = os.fork()
    if pid == 0:
        send_holder(theirs)
        os.read(wait, 1)
        os._exit(0)
    return pid, receive_holder(ours)

first, holder = start()
os.write(go, b".")
os.waitpid(first, 0)
before = liveness(holder).value
wait_for_another_tick(holder)
reuse_pid(first)
second, successor = start()
print(first == second, before, liveness(holder).value, liveness(successor).value, flush=True)
os.write(go, b".")
"""
    with elsewhere("-pf", "--mount-proc", program=PID_REUSE + program) as said:
        assert said == "True dead dead alive\n"


@linux_only
def test_a_process_with_the_pid_of_its_grandparent_is_not_mistaken_for_it() -> None:
    program = """
def be_the_parent():
    os.read(wait, 1)
    reuse_pid(grandparent)
    if os.fork() == 0:
        send_holder(theirs)
    os._exit(0)

if os.fork() == 0:
    send_holder(theirs)
    grandparent = os.getpid()
    if os.fork() == 0:
        be_the_parent()  # which never determines its own identity
    os._exit(0)
holder = receive_holder(ours)
os.waitpid(holder.pid, 0)
wait_for_another_tick(holder)
os.write(go, b".")
grandchild = receive_holder(ours)
print(grandchild.pid == holder.pid, grandchild.start_time != holder.start_time, flush=True)
"""
    with elsewhere("-pf", "--mount-proc", program=PID_REUSE + program) as said:
        assert said == "True True\n"
