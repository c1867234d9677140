"""Manifests and lists of shared directories with names that lead out of the tree are refused when they are decoded."""

from __future__ import annotations

import struct
import zlib
from pathlib import Path

import pytest

from holdfast.errors import Corrupt
from holdfast.trees import shared_dirs
from holdfast.trees.manifest import (
    Manifest,
    Meta,
    decode_entry,
    encode_body,
    encode_entry,
    raw_entries,
    read_manifest,
    write_manifest,
)
from holdfast.trees.verify import verify

FILE, DIRECTORY = Meta(b"f", 0o644, 0, 0, 0), Meta(b"d", 0o755, 0, 0, 0)
PATHS = [b"/etc", b"..", b".", b"a/../b", b"a//b", b"a/", b"./a", b"a\0b"]


def _body(*entries: bytes, meta: Meta = DIRECTORY) -> bytes:
    return encode_body(meta, b"", list(entries))


@pytest.mark.parametrize("path", PATHS)
def test_the_path_of_a_directory_that_leads_elsewhere_is_corrupt(tmp_path: Path, path: bytes) -> None:
    write_manifest(tmp_path / "manifest", [(b"", _body()), (path, _body())])

    with pytest.raises(Corrupt, match="lead elsewhere"):
        Manifest.read(tmp_path)


@pytest.mark.parametrize("name", [b"", b".", b"..", b"a/b", b"/etc/passwd", b"a\0b"])
def test_the_name_of_an_entry_that_leads_elsewhere_is_corrupt(name: bytes) -> None:
    with pytest.raises(Corrupt, match="lead elsewhere"):
        raw_entries(_body(encode_entry(FILE, b"fine", 0, bytes(32)), encode_entry(FILE, name, 0, bytes(32))))


@pytest.mark.parametrize("path", PATHS)
def test_a_hard_link_to_a_path_that_leads_elsewhere_is_corrupt(path: bytes) -> None:
    extras = b"H" + len(path).to_bytes(4, "little") + path
    with pytest.raises(Corrupt, match="unsafe link target"):
        decode_entry(b"", encode_entry(FILE, b"name", 0, bytes(32), extras))


@pytest.mark.parametrize("kind", [b"\xff", b"x", b"d"])
def test_a_kind_that_is_none_and_a_broken_extra_are_problems_of_the_manifest(tmp_path: Path, kind: bytes) -> None:
    entry = encode_entry(FILE._replace(kind=kind), b"name", 0, b"", b"L\x01")
    (tmp_path / "payload").mkdir()
    write_manifest(tmp_path / "manifest", [(b"", _body(entry))])

    with pytest.raises(Corrupt):
        list(read_manifest(tmp_path))
    assert "manifest" in {each.what for each in verify(tmp_path)}


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("is_there", [False, True])
def test_a_shared_directory_that_leads_elsewhere_is_corrupt(tmp_path: Path, path: bytes, is_there: bool) -> None:
    here, there = (b"src", path) if is_there else (path, b"src")
    content = b"holdfast homes 1\n" + struct.pack("<II", 1, 4) + b"00aa"
    content += struct.pack("<III", 0, len(here), len(there)) + here + there
    (tmp_path / "homes").write_bytes(content + struct.pack("<II", 0xFFFFFFFF, zlib.crc32(content)))

    with pytest.raises(Corrupt, match="lead elsewhere"):
        shared_dirs.read_shared_directories(tmp_path, complete=False)
