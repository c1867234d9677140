"""The site of a repository whose records are on a server: its files, and the machines that are known to see them.

A machine whose directory only looks the same (a copy, or the mount point of a volume that is not mounted) would publish
content that no other has. So every machine leaves a mark in the files and in the store; without one, it gets no lease
and takes no snapshot:

    .holdfast/machines/<machine>.json   the mark of a machine, in the files
    jvs/sites/<site>                    the marks of all machines, in the store, and the epoch

1. The first machine puts its mark in both.
2. Another machine finds the marks of all known ones, and the token of every grant, in its files. While no other has a
   lease, that is enough to put its own mark in both: its files are up to date, though perhaps a copy.
3. Otherwise, it puts its mark in its files and a request in the store; a known machine that sees the mark admits it.
4. A machine must find the marks of all others in its files. So of two copies, only one can continue.
5. A machine that has booted again replaces its mark. Of two clones of one machine, only one can do that.

A server that was restored from an older backup is detected in the same way: its records lack marks or tokens that the
files have.

    .holdfast/tokens/<kind>/<name>.json  the highest token that was granted here

In any case, new tokens are higher. A person resolves either problem with `adopt`, which begins the next epoch.
"""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import msgspec

from holdfast.clock import format_instant, parse_instant
from holdfast.errors import Corrupt, Failure, FilesUnproven, LockConflict, NotFound, StoreRestored
from holdfast.fs import durable
from holdfast.fs.directory import Directory, entry_exists, make_directories
from holdfast.leases.rules import WORKTREE_LEASES, Identity, Lease, LeaseKeys
from holdfast.leases.service import LeaseService
from holdfast.locks.file_lock import FileLocker
from holdfast.store.audit import AuditTrail
from holdfast.store.model import Create, Decision, Family, Instant, Key, Replace, SafeName, Store, StructCodec, View

Record = TypeVar("Record")

CACHES_LAG = 1.0  # seconds during which a network filesystem may show an older mark
PROOF_LASTS = 5.0  # seconds until a process proves itself again, and admits new machines
_CONTROL = ".holdfast"
_LARGEST = 1 << 16


class MachineMark(msgspec.Struct, frozen=True, kw_only=True):
    """The mark of a machine, as the store has it. `number` grows whenever it is replaced; `inode` is that of
    `.holdfast`, which tells two directories of one machine apart."""

    nonce: str
    number: int
    host: str
    boot_id: str
    inode: int
    at: Instant


class SiteRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The machines that see the files, and those that ask to be admitted."""

    site_id: SafeName
    epoch: int
    machines: dict[str, MachineMark]
    asking: dict[str, MachineMark] = {}


class OwnMark(msgspec.Struct, frozen=True, kw_only=True):
    """The mark of a machine, as its files have it: with the last nonces, because the files get a new one first."""

    epoch: int
    number: int
    nonces: tuple[str, ...]


class SeenToken(msgspec.Struct, frozen=True):
    """The highest token of a lease that was granted here, and the epoch of that grant."""

    token: int
    epoch: int = 0


SITES: Family[SiteRecord] = Family("jvs/sites", StructCodec(SiteRecord), id_field="site_id")
_OWN, _SEEN = StructCodec(OwnMark), StructCodec(SeenToken)


class Site:
    """The files of one repository, as this machine sees them. In a git home that several clones share, `name` is that
    of the clone; any other repository has one site."""

    def __init__(self, root: Path, store: Store, identity: Identity, host: str, *, name: str) -> None:
        self.key: Key[SiteRecord] = SITES.key(name)
        self._name = name
        self._control, self._guard = root / _CONTROL, root / ".jvs" / "guards" / "site.lock"
        self._store, self._host, self._identity = store, host, identity
        self._machine = _machine_of(identity)
        self._epoch = 0
        self._proven_until = 0.0
        self._seen: dict[str, SeenToken] = {}

    # --- Proof -------------------------------------------------------------------------------------

    def prove(self) -> None:
        """Prove that this machine sees the files that the records belong to, or raise `FilesUnproven` or
        `StoreRestored`. Admits machines that have left their marks here."""
        if time.monotonic() < self._proven_until:
            return
        record = self._read()
        if record is None or not self._is_proven(record):
            make_directories(self._guard.parent)
            with FileLocker(follow_links=False).lock_exclusive(self._guard):
                record = self._settle()
        self._epoch = record.epoch
        self._proven_until = time.monotonic() + PROOF_LASTS
        if record.asking:
            self._admit(record)

    def require(self, view: View, worktree: str) -> None:
        """Compare the last token with that granted here, in the transaction that grants the next. Pure."""
        counter = view.get(LeaseKeys.of(worktree).counter)
        _check_token(self._epoch, worktree, counter.fencing_token if counter else 0, self._seen.get(worktree))

    def problem(self) -> Failure | None:
        """Why this machine gets no lease; None if it can get one. Changes nothing."""
        record = self._read()
        try:
            if record is None or not self._is_proven(record):
                return self._unproven(record) if self._step(record) == self._ask else None
            for name, document in self._store.scan(WORKTREE_LEASES.counters):
                _check_token(record.epoch, name, document.record.fencing_token, self._seen_token(LeaseKeys.of(name)))
        except (FilesUnproven, StoreRestored) as failure:
            return failure
        return None

    def is_elsewhere(self, identity: Identity) -> bool:
        """Whether a process belongs to another machine that sees these files. Locks may not reach that machine, so a
        free lock does not mean that the process is gone."""
        if not identity.boot_id or identity.boot_id == self._identity.boot_id:
            return False
        machine = _machine_of(identity)
        record = None if machine == self._machine else self._read()
        return record is not None and machine in record.machines

    def adopt(self, leases: LeaseService, trail: AuditTrail) -> int:
        """Declare that these files and the present records belong together. Every other machine must then prove itself
        again. Returns the new epoch. Raises `LockConflict` if another machine has a lease, or gets one meanwhile: when
        this returns, no other machine has a lease or will get one under an older proof."""
        self._refuse_foreign_lease()
        own, record = self._own(), self._read()
        epoch = 1 + max(own.epoch if own else 0, record.epoch if record else 0)
        nonce = self._write_own(epoch, 1)

        def decide(view: View, now: float) -> Decision[None]:
            before = view.get(self.key)
            new = SiteRecord(site_id=self._name, epoch=epoch, machines={self._machine: self._mark(nonce, 1, now)})
            facts: dict[str, object] = {"epoch": epoch, "machines": _hosts(before), "host": self._host}
            entry = trail.entry(view, now, "files_adopted", actor=leases.holder.holder_id, facts=facts)
            return Decision([(Create if before is None else Replace)(self.key, new), entry], None)

        self._store.transact([self.key, trail.stream], decide)
        time.sleep(PROOF_LASTS)  # a machine with an older proof has got its lease by now
        self._refuse_foreign_lease()
        self._proven_until = 0.0
        return epoch

    def _read(self) -> SiteRecord | None:
        document = self._store.read(self.key)
        return None if document is None else document.record

    def _is_proven(self, record: SiteRecord) -> bool:
        own, mark = self._own(), record.machines.get(self._machine)
        if mark is None or own is None:
            return False
        is_here = mark.boot_id == self._identity.boot_id and mark.inode == self._inode()
        return is_here and mark.nonce == own.nonces[-1] and own.epoch == record.epoch and self._sees_all(record)

    def _sees_all(self, record: SiteRecord) -> bool:
        """Whether the marks of all other machines are in these files."""
        others = {name: mark for name, mark in record.machines.items() if name != self._machine}
        deadline = time.monotonic() + CACHES_LAG
        while not all(mark.nonce in self._nonces(name) for name, mark in others.items()):
            if time.monotonic() >= deadline:
                return False
            time.sleep(CACHES_LAG / 10)
        return True

    def _is_up_to_date(self) -> bool:
        """Whether the last token of every worktree was granted here."""
        for name, document in self._store.scan(WORKTREE_LEASES.counters):
            seen = self._seen_token(LeaseKeys.of(name))
            if seen is None or seen.token != document.record.fencing_token:
                return False
        return True

    def _refuse_foreign_lease(self) -> None:
        if (lease := self._foreign_lease()) is not None:
            message = f"{lease.subject} is leased by {lease.who()}, on another machine"
            raise LockConflict(message, worktree=lease.subject, holder_id=lease.holder_id)

    def _foreign_lease(self) -> Lease | None:
        """An unexpired lease of a worktree that another machine has."""
        now = self._store.now()
        for _, document in self._store.scan(WORKTREE_LEASES.leases):
            lease = document.record
            if _machine_of(lease.identity) != self._machine and parse_instant(lease.lease_expires_at) > now:
                return lease
        return None

    def _settle(self) -> SiteRecord:
        """Take the steps that are due until this machine is proven, under a lock that its processes share."""
        while True:
            record = self._read()
            if record is not None and self._is_proven(record):
                return record
            self._step(record)(record)

    def _step(self, record: SiteRecord | None) -> Callable[[SiteRecord | None], None]:
        """The step that is due; raises if there is none."""
        own = self._own()
        if record is None:
            if own is not None and entry_exists(self._control / "tokens" / "worktrees"):  # else it died at the start
                raise _restored("the server has no record of these files")
            return self._found
        if own is not None and own.epoch > record.epoch:
            raise _restored(f"the server is in the epoch {record.epoch}, and the files are in the epoch {own.epoch}")
        mark = record.machines.get(self._machine)
        return self._step_of_newcomer(record, own) if mark is None else self._step_of_known(record, mark, own)

    def _step_of_newcomer(self, record: SiteRecord, own: OwnMark | None) -> Callable[[SiteRecord | None], None]:
        if self._sees_all(record) and self._is_up_to_date() and self._foreign_lease() is None:
            return self._join
        asked = record.asking.get(self._machine)
        if own is not None and asked is not None and asked.nonce == own.nonces[-1]:
            raise self._unproven(record)
        return self._ask

    def _step_of_known(
        self, record: SiteRecord, mark: MachineMark, own: OwnMark | None
    ) -> Callable[[SiteRecord | None], None]:
        is_other = mark.boot_id == self._identity.boot_id and mark.inode != self._inode()
        if own is None or is_other:
            raise self._unproven(record)
        if mark.nonce not in own.nonces and own.number > mark.number:
            raise _restored("the server has an older mark of this machine")
        if mark.nonce not in own.nonces or not self._sees_all(record):
            raise self._unproven(record)
        return self._replace

    def _found(self, record: SiteRecord | None) -> None:
        nonce = self._write_own(1, 1)

        def decide(view: View, now: float) -> Decision[None]:
            if view.get(self.key) is not None:
                return Decision([], None)
            machines = {self._machine: self._mark(nonce, 1, now)}
            return Decision([Create(self.key, SiteRecord(site_id=self._name, epoch=1, machines=machines))], None)

        self._store.transact([self.key], decide)

    def _replace(self, record: SiteRecord | None) -> None:
        assert record is not None
        old = record.machines[self._machine]
        nonce = self._write_own(record.epoch, old.number + 1, old.nonce)
        self._change(
            lambda now, known: (
                known
                if known.machines.get(self._machine) != old
                else msgspec.structs.replace(
                    known, machines={**known.machines, self._machine: self._mark(nonce, old.number + 1, now)}
                )
            )
        )

    def _join(self, record: SiteRecord | None) -> None:
        assert record is not None
        nonce = self._write_own(record.epoch, 1)

        def change(now: float, known: SiteRecord) -> SiteRecord:
            asking = {name: mark for name, mark in known.asking.items() if name != self._machine}
            machines = {**known.machines, self._machine: self._mark(nonce, 1, now)}
            return known if known != record else msgspec.structs.replace(known, machines=machines, asking=asking)

        self._change(change)

    def _ask(self, record: SiteRecord | None) -> None:
        assert record is not None
        nonce = self._write_own(record.epoch, 1)
        self._change(
            lambda now, known: msgspec.structs.replace(
                known, asking={**known.asking, self._machine: self._mark(nonce, 1, now)}
            )
        )

    def _admit(self, record: SiteRecord) -> None:
        """Admit the machines whose marks are in these files."""
        found = {name: mark for name, mark in record.asking.items() if mark.nonce in self._nonces(name)}
        if not found:
            return

        def change(now: float, known: SiteRecord) -> SiteRecord:
            asking = {name: mark for name, mark in known.asking.items() if found.get(name) != mark}
            admitted = {name: mark for name, mark in found.items() if known.asking.get(name) == mark}
            return msgspec.structs.replace(known, machines={**known.machines, **admitted}, asking=asking)

        self._change(change)

    def _change(self, change: Callable[[float, SiteRecord], SiteRecord]) -> None:
        def decide(view: View, now: float) -> Decision[None]:
            known = view.get(self.key)
            new = known and change(now, known)
            return Decision([] if new is None or new == known else [Replace(self.key, new)], None)

        self._store.transact([self.key], decide)

    def _mark(self, nonce: str, number: int, now: float) -> MachineMark:
        return MachineMark(
            nonce=nonce,
            number=number,
            host=self._host,
            boot_id=self._identity.boot_id,
            inode=self._inode(),
            at=format_instant(now),
        )

    def _unproven(self, record: SiteRecord | None) -> FilesUnproven:
        return FilesUnproven(str(self._control.parent), _hosts(record))

    # --- Files -------------------------------------------------------------------------------------

    def _inode(self) -> int:
        with Directory.open(self._control.parent) as root:
            status = root.status(_CONTROL)
        return status.st_ino if status else 0

    def _own(self) -> OwnMark | None:
        return _read_record(self._mark_file(self._machine), _OWN)

    def _nonces(self, machine: str) -> tuple[str, ...]:
        found = _read_record(self._mark_file(machine), _OWN)
        return found.nonces if found else ()

    def _mark_file(self, machine: str) -> Path:
        return self._control / "machines" / f"{machine}.json"

    def _write_own(self, epoch: int, number: int, *before: str) -> str:
        nonce = secrets.token_hex(8)
        path = self._mark_file(self._machine)
        make_directories(path.parent)
        own = OwnMark(epoch=epoch, number=number, nonces=(*before, nonce))
        durable.replace(path, _OWN.encode(own))
        return nonce

    # --- Tokens ------------------------------------------------------------------------------------

    def before_grant(self, keys: LeaseKeys) -> int:
        """Prove the site, if the lease is one of a worktree; return the highest token that was granted here."""
        if not keys.is_named:
            self.prove()
        seen = self._seen_token(keys)
        if seen is not None and not keys.is_named:
            self._seen[keys.subject] = seen
        return seen.token if seen else 0

    def _seen_token(self, keys: LeaseKeys) -> SeenToken | None:
        return _read_record(self._token_file(keys), _SEEN)

    def after_grant(self, keys: LeaseKeys, token: int) -> None:
        """Note a token. A power cut may lose the note: that matters only if the server loses the token too."""
        path, own = self._token_file(keys), self._own()
        make_directories(path.parent)
        content = _SEEN.encode(SeenToken(token, own.epoch if own else 0))
        with Directory.open(path.parent) as directory:
            draft = durable.write_draft(directory, path.name, content, durable=False)
            durable.publish(directory, draft, path.name)

    def _token_file(self, keys: LeaseKeys) -> Path:
        return self._control / "tokens" / ("named" if keys.is_named else "worktrees") / f"{keys.subject}.json"


def _read_record(path: Path, codec: StructCodec[Record]) -> Record | None:
    """The record in a file; None if there is none, or if a power cut has damaged it."""
    with contextlib.suppress(NotFound, Corrupt):
        return codec.decode(durable.read(path, limit=_LARGEST), str(path))
    return None


def _machine_of(identity: Identity) -> str:
    return identity.machine_id or identity.boot_id or "unknown"


def _hosts(record: SiteRecord | None) -> list[str]:
    return sorted({mark.host for mark in record.machines.values()}) if record else []


def _check_token(epoch: int, worktree: str, current: int, seen: SeenToken | None) -> None:
    if seen is not None and seen.token > current and seen.epoch >= epoch:
        raise _restored(f"the last token of {worktree} is {current} there, but {seen.token} was granted here")


def _restored(reason: str) -> StoreRestored:
    return StoreRestored(f"the records on the server are older than the files of this repository: {reason}")
