"""Hostile inputs for decoders: valid ones with tokens exchanged, bytes flipped and parts cut, repeated or nested."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Sequence
from functools import lru_cache

_TOKEN = re.compile(rb'"(?:[^"\\]|\\.)*"|[-+0-9.eE]+|true|false|null|[{}\[\]:,]|[^"\s{}\[\]:,]+', re.DOTALL)

HOSTILE: tuple[bytes, ...] = (
    *(b"null", b"true", b"false", b"0", b"-1", b"1", b"1.5", b"-0", b"1e999", b"-1e999", b"1e308", b"1E400"),
    *(b"9" * 30, b"9" * 400, b"9" * 5000, b"-" + b"9" * 20, b"18446744073709551616", b"9223372036854775808"),
    *(b"NaN", b"Infinity", b"-Infinity", b"[]", b"{}", b'[""]', b"[[]]", b'{"":{}}', b'{"a":1,"a":2}', b'""'),
    *(b'"x"', b'"."', b'".."', b'"/"', b'"../../../home/docs"', b'"/etc/passwd"', b'"a/b"', b'"-rf"', b'"\\u0000"'),
    *(b'"\\ud800"', b'"\\udfff\\ud800"', b'"\xff\xfe"', b'"\x00"', b'"\x1b[2J"', b'"' + b"x" * 5000 + b'"'),
    *(b'"2999-01-01T00:00:00Z"', b'"2020-01-01"', b'"2020-01-01T00:00:00"', b'"9999-12-31T23:59:59-23:59"'),
    *(b'"0001-01-01T00:00:00+23:59"', b'"2020-W01-1"', b'"not a time"', b'"1e400"', b'"99999999999999999999"'),
    *(b'"host:user:1:1"', b'"a:b:99999999999:c"', b'":::"', b'"a:b:\\u0661:c"', b'"done"', b'"decided"', b'"restore"'),
    *(b"[" * 90 + b"]" * 90, b"[" * 2000 + b"]" * 2000, b'{"a":' * 2000 + b"1" + b"}" * 2000, b"[" * 100_000),
    *(b'{"(unknown)":1}', b'{"id":[]}', b'[{"type":1}]', b"\x00", b"\xff" * 8, b"\xff\xff\xff\xff", b"\n", b"\r\n"),
)
"""Tokens that take the place of others."""

_WHOLE: tuple[bytes, ...] = (b"", b" ", b"\n", b"\0", b"\xef\xbb\xbf{}", b"{", b"[", b'"', b"\xff\xfe", *HOSTILE)


@lru_cache(maxsize=256)
def _tokens(sample: bytes) -> tuple[bytes, ...]:
    return tuple(_TOKEN.findall(sample))


def mutated(sample: bytes, others: Sequence[bytes], chance: random.Random) -> bytes:
    """One hostile input, from a valid one."""
    kind = chance.random()
    if kind < 0.55:
        return _exchanged(sample, chance)
    if kind < 0.75:
        return _flipped(sample, chance)
    if kind < 0.87:
        return _cut(sample, chance)
    if kind < 0.94:
        other = chance.choice(others)
        return sample[: chance.randrange(len(sample) + 1)] + other[chance.randrange(len(other) + 1) :]
    return chance.choice(_WHOLE)


def _exchanged(sample: bytes, chance: random.Random) -> bytes:
    """Exchange one to three tokens."""
    tokens = list(_tokens(sample))
    if not tokens:
        return chance.choice(HOSTILE)
    for _ in range(1 if chance.random() < 0.7 else 3):
        at = chance.randrange(len(tokens))
        tokens[at] = chance.choice(HOSTILE) if chance.random() < 0.8 else chance.choice(tokens)
    return b"".join(tokens)


def _flipped(sample: bytes, chance: random.Random) -> bytes:
    content = bytearray(sample or b"\0")
    for _ in range(1 if chance.random() < 0.5 else chance.randrange(1, 9)):
        at = chance.randrange(len(content))
        content[at] = chance.choice((content[at] ^ (1 << chance.randrange(8)), 0, 0xFF, 0x7F, 0x2E, 0x2F))
    return bytes(content)


def _cut(sample: bytes, chance: random.Random) -> bytes:
    """Cut a part out, double it, or insert bytes."""
    start = chance.randrange(len(sample) + 1)
    end = min(len(sample), start + chance.randrange(1, 40))
    part = (b"", sample[start:end] * 2, chance.randbytes(4), chance.choice(HOSTILE))[chance.randrange(4)]
    return sample[:start] + part + sample[end:]


def hostile_inputs(samples: Sequence[bytes], chance: random.Random) -> Iterator[bytes]:
    """Endless hostile inputs."""
    while True:
        yield mutated(chance.choice(samples), samples, chance)
