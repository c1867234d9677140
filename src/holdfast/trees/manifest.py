"""The manifest of a tree: every entry, in a canonical form. Equal trees have equal manifests, byte for byte.

One record per directory, in byte order of the names, each directory before those below it. A record is a path
and a *body*; the body does not contain the path, so an unchanged directory has the same body wherever it is.
The hash of the whole file is the payload's hash.

    file    = "holdfast manifest 1\\n" record* end
    record  = u32 length of path, u32 length of body, path, body
    body    = kind (d, or m: a mount point, not entered), 0, u16 mode, u32 uid, u32 gid, s64 mtime in ns,
              u32 length of extras, u32 number of entries, extras, entry*
    entry   = kind, 0, u16 mode, u32 uid, u32 gid, s64 mtime in ns, u64 size, u16 length of name,
              u32 length of extras, name, for files the 32 bytes of their SHA-256, extras
    extras  = (tag, u32 length, value)*, the tags in this order:
              H path of the first name of the same inode; L target of a symbolic link; R u64 device number;
              X (u16 length of name, u32 length of value, name, value)* extended attributes, in order of names
    end     = u32 0xffffffff, u32 number of records

All numbers are little-endian. Kinds of entries: f file, l symbolic link, p fifo, s socket, c and b devices.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from holdfast.errors import Corrupt
from holdfast.fs.directory import opened, parent_of, write_all
from holdfast.trees.walker import NOFOLLOW, read_whole, unreadable, writing

PAYLOAD = "payload"
MANIFEST = "manifest"
READY = ".READY"
"""Written last: a tree with it is complete. Inside the payload, this name has no meaning."""
HOMES = "homes"
"""The list of shared directories; absent if there are none."""
REMNANTS = "remnants"
"""The retained directories, beside the directory of the trees."""
KEPT_MODE = 0o755
"""The permissions that entries of a payload may have: only their owner writes. The manifest has the original mode."""

MAGIC = b"holdfast manifest 1\n"
_MAGIC_WORDS = b"holdfast manifest "
RECORD = struct.Struct("<II")
BODY = struct.Struct("<cxHIIqII")
ENTRY = struct.Struct("<cxHIIqQHI")
_LENGTHS = struct.Struct("<HI")  # at the end of the head of an entry
_SIZE_AT, _NAME_LENGTH_AT, _EXTRAS_LENGTH_AT = 20, 28, 30
_FILE = ord("f")
_KINDS = frozenset((b"f", b"l", b"p", b"s", b"c", b"b"))
_EXTRA = struct.Struct("<cI")
_XATTR = struct.Struct("<HI")
_DEVICE = struct.Struct("<Q")
END = 0xFFFFFFFF
_MTIME_AT = 12
_CHUNK = 4 << 20
DIGEST = 32

Xattrs = tuple[tuple[bytes, bytes], ...]


class Meta(NamedTuple):
    kind: bytes
    mode: int
    uid: int
    gid: int
    mtime_ns: int


class ManifestEntry(NamedTuple):
    """One entry of a tree. `kind` is d, f, l, p, s, c, b, or m for a mount point."""

    path: bytes
    kind: str
    mode: int
    uid: int
    gid: int
    mtime_ns: int
    size: int = 0
    sha256: str = ""
    target: bytes = b""
    first_link: bytes = b""
    device: int = 0
    xattrs: Xattrs = ()

    @property
    def name(self) -> bytes:
        return self.path.rpartition(b"/")[2]

    @property
    def meta(self) -> Meta:
        return Meta(self.kind.encode(), self.mode, self.uid, self.gid, self.mtime_ns)

    def as_record(self) -> dict[str, object]:
        """Fields for JSON. Backslashes and bytes that are not UTF-8 are written as `\\xNN`."""
        fields: dict[str, object] = {"path": escaped(self.path), "kind": self.kind, "mode": f"{self.mode:04o}"}
        fields |= {"uid": self.uid, "gid": self.gid, "mtime_ns": self.mtime_ns}
        if self.kind == "f":
            fields |= {"size": self.size, "sha256": self.sha256}
        if self.kind in ("c", "b"):
            fields["device"] = self.device
        for name, value in (("target", self.target), ("first_link", self.first_link)):
            if value:
                fields[name] = escaped(value)
        if self.xattrs:
            fields["xattrs"] = {escaped(name): value.hex() for name, value in self.xattrs}
        return fields


def escaped(name: bytes) -> str:
    """Bytes as text, reversibly."""
    return name.replace(b"\\", rb"\x5c").decode("utf-8", "backslashreplace")


def _extra(tag: bytes, value: bytes) -> bytes:
    return _EXTRA.pack(tag, len(value)) + value


def encode_extras(*, target: bytes | None = None, device: int | None = None, xattrs: Xattrs = ()) -> bytes:
    """The extras of an entry, except for the path of a first link."""
    found = b"" if target is None else _extra(b"L", target)
    if device is not None:
        found += _extra(b"R", _DEVICE.pack(device))
    if xattrs:
        each = [_XATTR.pack(len(name), len(value)) + name + value for name, value in sorted(xattrs)]
        found += _extra(b"X", b"".join(each))
    return found


def encode_entry(meta: Meta, name: bytes, size: int = 0, digest: bytes = b"", extras: bytes = b"") -> bytes:
    return ENTRY.pack(*meta, size, len(name), len(extras)) + name + digest + extras


def encode_body(meta: Meta, extras: bytes, entries: list[bytes]) -> bytes:
    return BODY.pack(*meta, len(extras), len(entries)) + extras + b"".join(entries)


def write_manifest(path: str | os.PathLike[str], records: Iterable[tuple[bytes, bytes]]) -> str:
    """Write a new manifest and return its hash, which is the payload's."""
    import hashlib

    digest = hashlib.sha256()
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | NOFOLLOW
    with writing(path), parent_of(path) as (here, name), opened(name, flags, 0o444, dir_fd=here) as descriptor:
        for chunk in _chunks(records):
            digest.update(chunk)
            write_all(descriptor, chunk)
    return digest.hexdigest()


def _chunks(records: Iterable[tuple[bytes, bytes]]) -> Iterator[bytes]:
    parts, size, count = [MAGIC], 0, 0
    for path, body in records:
        parts += (RECORD.pack(len(path), len(body)), path, body)
        size += len(path) + len(body)
        count += 1
        if size > _CHUNK:
            yield b"".join(parts)
            parts, size = [], 0
    parts.append(RECORD.pack(END, count))
    yield b"".join(parts)


class Manifest:
    """A manifest that was read: the body of each directory, by path."""

    def __init__(self, content: bytes, *, where: str) -> None:
        self.where = where
        self._content = content
        self._bodies: dict[bytes, tuple[int, int]] = {}
        self._index()

    @classmethod
    def read(cls, tree: str | os.PathLike[str]) -> Manifest:
        """Raises `IoFailure` or `Corrupt`."""
        where = f"{os.fspath(tree)}/{MANIFEST}"
        try:
            content = read_whole(where)
        except OSError as error:
            raise unreadable(where, error) from error
        return cls(content, where=where)

    @property
    def payload_hash(self) -> str:
        import hashlib

        return hashlib.sha256(self._content).hexdigest()

    def body(self, path: bytes) -> bytes | None:
        found = self._bodies.get(path)
        return None if found is None else self._content[found[0] : found[1]]

    def __len__(self) -> int:
        return len(self._bodies)

    def paths(self) -> Iterator[bytes]:
        """The directories, each before its subdirectories."""
        return iter(self._bodies)

    def records(self) -> Iterator[tuple[bytes, bytes]]:
        for path, (start, end) in self._bodies.items():
            yield path, self._content[start:end]

    def _index(self) -> None:
        content, at = self._content, len(MAGIC)
        if content[:at] != MAGIC:
            raise self._unknown()
        try:
            while True:
                length, size = RECORD.unpack_from(content, at)
                at += RECORD.size
                if length == END:
                    break
                start = at + length
                path = content[at:start]
                if path and not is_safe_path(path):
                    raise self._broken(f"it has the path {path[:100]!r}, which could lead elsewhere")
                self._bodies[path] = (start, start + size)
                at = start + size
        except struct.error:
            raise self._broken("it is cut off") from None
        if size != len(self._bodies) or at != len(content) or b"" not in self._bodies:
            raise self._broken("its end does not match")

    def _unknown(self) -> Corrupt:
        if self._content.startswith(_MAGIC_WORDS):
            version = self._content[len(_MAGIC_WORDS) :].partition(b"\n")[0][:20].decode("ascii", "replace")
            message = f"{self.where} has format version {version}; this version of Holdfast supports version 1"
            return Corrupt(message, hint="Use the newer Holdfast that created this snapshot.", path=self.where)
        return self._broken("it has another first line")

    def _broken(self, why: str) -> Corrupt:
        return Corrupt(f"{self.where} is not a manifest: {why}", path=self.where)


_NOT_NAMES = frozenset((b"", b".", b".."))


def is_safe_path(path: bytes) -> bool:
    """Whether a path of a tree leads to something in it: no part is empty, `.` or `..`."""
    return _NOT_NAMES.isdisjoint(path.split(b"/")) and b"\0" not in path


def _broken_record(directory: bytes, why: object) -> Corrupt:
    where = escaped(directory) or "the top"
    return Corrupt(f"the manifest has a broken record of {where}: {why}", hint="Run 'holdfast verify'.", path=where)


def read_manifest(tree: str | os.PathLike[str]) -> Iterator[ManifestEntry]:
    """Every entry of a tree: each directory, its other entries, then its subdirectories."""
    for path, body in Manifest.read(tree).records():
        yield directory_of(path, body)
        for raw in raw_entries(body).values():
            yield decode_entry(path, raw)


def directory_of(path: bytes, body: bytes) -> ManifestEntry:
    (kind, mode, uid, gid, mtime), xattrs = meta_of_directory(body)
    if kind not in (b"d", b"m"):
        raise _broken_record(path, f"a directory of the kind {kind!r}")
    return ManifestEntry(path, kind.decode(), mode, uid, gid, mtime, xattrs=xattrs)


def meta_of_directory(body: bytes) -> tuple[Meta, Xattrs]:
    try:
        *meta, extras, _ = BODY.unpack_from(body)
        found = decode_extras(body[BODY.size : BODY.size + extras]) if extras else {}
        return Meta(*meta), decode_xattrs(found.get(b"X", b""))
    except struct.error as error:
        raise _broken_record(b"", error) from None


def mtime_of_directory(body: bytes) -> int:
    """When an entry was last added to the directory or removed from it."""
    return int.from_bytes(body[_MTIME_AT : _MTIME_AT + 8], "little", signed=True)


def raw_entries(body: bytes) -> dict[bytes, bytes]:
    """The encoded entries of a body, by name, in order. Raises `Corrupt`, also for a name that could lead elsewhere."""
    found: dict[bytes, bytes] = {}
    try:
        extras, count = BODY.unpack_from(body)[-2:]
        at, lengths, head = BODY.size + extras, _LENGTHS.unpack_from, ENTRY.size
        for _ in range(count):
            length, extras = lengths(body, at + _NAME_LENGTH_AT)
            start = at + head
            after = start + length
            end = after + extras + (DIGEST if body[at] == _FILE else 0)
            found[body[start:after]] = body[at:end]
            at = end
    except struct.error as error:
        raise _broken_record(b"", error) from None
    if at != len(body):
        raise _broken_record(b"", "the body does not end where its entries do")
    names = b"".join(found)  # all at once: there may be many
    if b"/" in names or b"\0" in names or b"" in found or b"." in found or b".." in found:
        raise _broken_record(b"", "it has a name that could lead elsewhere")
    return found


def decode_entry(directory: bytes, raw: bytes) -> ManifestEntry:
    """The entry of a directory, of which `raw_entries` has checked the name. Raises `Corrupt`."""
    try:
        kind, mode, uid, gid, mtime, size, length, extras = ENTRY.unpack_from(raw)
        end = ENTRY.size + length
        name = raw[ENTRY.size : end]
        path = directory + b"/" + name if directory else name
        digest = raw[end : end + DIGEST].hex() if kind == b"f" else ""
        found = decode_extras(raw[len(raw) - extras :]) if extras else {}
        device = _DEVICE.unpack(found[b"R"])[0] if b"R" in found else 0
        target, first, xattrs = found.get(b"L", b""), found.get(b"H", b""), decode_xattrs(found.get(b"X", b""))
    except struct.error as error:
        raise _broken_record(directory, error) from None
    if kind not in _KINDS or b"\0" in target or (first and not is_safe_path(first)):
        raise _broken_record(directory, f"{escaped(name)} has an unknown kind or an unsafe link target")
    return ManifestEntry(path, kind.decode(), mode, uid, gid, mtime, size, digest, target, first, device, xattrs)


def decode_extras(extras: bytes) -> dict[bytes, bytes]:
    found, at = {}, 0
    while at < len(extras):
        tag, size = _EXTRA.unpack_from(extras, at)
        at += _EXTRA.size
        found[tag] = extras[at : at + size]
        at += size
    return found


def decode_xattrs(value: bytes) -> Xattrs:
    found, at = [], 0
    while at < len(value):
        length, size = _XATTR.unpack_from(value, at)
        start = at + _XATTR.size
        found.append((value[start : start + length], value[start + length : start + length + size]))
        at = start + length + size
    return tuple(found)


_NO_EXTRAS = bytes(4)


def is_plain_file(raw: bytes) -> bool:
    return raw[:1] == b"f" and raw[_EXTRAS_LENGTH_AT : ENTRY.size] == _NO_EXTRAS


def is_like(raw: bytes, status: os.stat_result) -> bool:
    """Whether a file with this status may equal the entry."""
    _, _, _, _, mtime, size, _, _ = ENTRY.unpack_from(raw)
    return bool(size == status.st_size and mtime == status.st_mtime_ns)


def plain_file(raw: bytes) -> tuple[bytes, Meta, int]:
    """The name, fields and size of a file without extras."""
    kind, mode, uid, gid, mtime, size, length, _ = ENTRY.unpack_from(raw)
    return raw[ENTRY.size : ENTRY.size + length], Meta(kind, mode, uid, gid, mtime), size


def size_of(raw: bytes) -> int:
    return int.from_bytes(raw[_SIZE_AT:_NAME_LENGTH_AT], "little")


def digest_of(raw: bytes) -> bytes:
    end = _extras_at(raw)
    return raw[end - DIGEST : end]


def is_same_file(raw: bytes, other: bytes) -> bool:
    """Whether two entries are equal except for their names."""
    after_name, other_after_name = raw[_extras_at(raw) - DIGEST :], other[_extras_at(other) - DIGEST :]
    return raw[:_NAME_LENGTH_AT] == other[:_NAME_LENGTH_AT] and after_name == other_after_name


def without_first_link(raw: bytes) -> bytes:
    """The entry as if the file had one name."""
    at = _extras_at(raw)
    return raw if len(raw) == at or b"H" not in decode_extras(raw[at:]) else with_first_link(raw, b"")


def with_first_link(raw: bytes, first: bytes) -> bytes:
    """The entry of another name of the file at the path `first`; of the only name if that is empty."""
    at = _extras_at(raw)
    xattrs = decode_extras(raw[at:]).get(b"X")
    extras = (_extra(b"H", first) if first else b"") + (_extra(b"X", xattrs) if xattrs else b"")
    return raw[:_EXTRAS_LENGTH_AT] + len(extras).to_bytes(4, "little") + raw[ENTRY.size : at] + extras


def _extras_at(raw: bytes) -> int:
    return ENTRY.size + int.from_bytes(raw[_NAME_LENGTH_AT:_EXTRAS_LENGTH_AT], "little") + DIGEST
