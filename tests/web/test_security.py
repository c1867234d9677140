"""Attacks are refused, each by one check: with that check removed, the attack is no longer refused in that way."""

from __future__ import annotations

import contextlib
import re
from functools import reduce
from typing import Any

import pytest

from holdfast.web import security
from holdfast.web.app import refusal_page
from holdfast.web.security import Access, Arrived, Refusal, Secured
from tests.web.attacks import ATTACKS, BODY, CLIENT, JSON, Attack

PORT = 8642


def fine_request(access: Access, method: str) -> list[tuple[bytes, bytes]]:
    """The headers of a request of our own page."""
    headers = [(b"host", b"127.0.0.1:8642"), (b"cookie", cookie_of(access).encode())]
    if method == "POST":
        headers += [(b"origin", b"http://127.0.0.1:8642"), (b"sec-fetch-site", b"same-origin"), JSON]
        headers.append((b"content-length", b"%d" % len(BODY)))
    return headers


def cookie_of(access: Access) -> str:
    cookie = access.redeem(access.one_time_path.removeprefix(security.OPEN))
    assert cookie is not None
    return cookie.partition(";")[0]


def scope_of(attack: Attack, access: Access) -> dict[str, Any]:
    token = cookie_of(access).partition("=")[2].encode()
    changed = {name for name, _ in attack.headers}
    kept = [(name, value) for name, value in fine_request(access, attack.method) if name not in changed]
    secrets = {b"TOKEN": token, b"SCRAPER": access.scraper_token.encode()}
    added = [
        (name, reduce(lambda text, each: text.replace(*each), secrets.items(), value))
        for name, value in attack.headers
        if value is not None
    ]
    return {
        "type": "http",
        "method": attack.method,
        "path": attack.path.decode("latin-1"),
        "raw_path": attack.path,
        "query_string": attack.query.replace(b"TOKEN", token),
        "headers": [*kept, *added, *attack.repeated],
        "client": (CLIENT, 40_000),
    }


def judged(attack: Attack) -> Refusal | None:
    access = Access([], PORT, writable=attack.writable)

    async def never(*_: object) -> None:
        raise AssertionError("it was served")

    with contextlib.ExitStack() as stack:
        for client, count in attack.open.items():
            for _ in range(count):
                stack.enter_context(access.places(attack.path).taken(client))
        return security.judge(Secured(never, access, refusal_page).arrived(scope_of(attack, access)))


def test_there_are_enough_attacks_and_each_check_has_one() -> None:
    assert len(ATTACKS) >= 40
    assert {each.check for each in ATTACKS} == {check.__name__ for check in security.CHECKS}


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda each: each.name)
def test_an_attack_is_refused_by_its_check(attack: Attack, monkeypatch: pytest.MonkeyPatch) -> None:
    refusal = judged(attack)
    assert refusal is not None
    assert refusal.status == attack.status

    left = [check for check in security.CHECKS if check.__name__ != attack.check]
    monkeypatch.setattr(security, "CHECKS", left)
    without = judged(attack)
    assert without is None or without.message != refusal.message


@pytest.mark.parametrize("method", ["GET", "HEAD", "POST"])
def test_a_request_of_our_own_page_passes(method: str) -> None:
    assert judged(Attack("fine", "", 0, path=b"/r/harbour/do/move", method=method)) is None


@pytest.mark.parametrize(
    ("path", "count"), [(b"/r/harbour/board", security.REQUESTS_EACH), (b"/events", security.STREAMS_EACH)]
)
def test_a_client_has_its_share_whatever_another_one_has(path: bytes, count: int) -> None:
    assert judged(Attack("its last place", "", 0, path=path, open={CLIENT: count - 1, "192.0.2.2": count})) is None


def test_a_place_is_free_again_after_the_request() -> None:
    places = security.Places(total=1, each=1)
    with contextlib.suppress(ValueError), places.taken(CLIENT):
        assert places.refusal(CLIENT) is not None
        raise ValueError
    assert places.refusal(CLIENT) is None


def test_a_link_on_another_page_may_lead_here() -> None:
    fetched = ((b"sec-fetch-site", b"cross-site"), (b"sec-fetch-mode", b"navigate"), (b"sec-fetch-dest", b"document"))
    assert judged(Attack("a link", "", 0, headers=fetched)) is None


@pytest.mark.parametrize("path", [b"/metrics", b"/r/harbour/metrics"])
def test_a_scraper_with_its_token_gets_the_metrics(path: bytes) -> None:
    headers = ((b"cookie", None), (b"authorization", b"Bearer SCRAPER"))
    assert judged(Attack("a scraper", "", 0, path=path, headers=headers)) is None


def test_the_one_time_address_lets_one_browser_in() -> None:
    access = Access([], PORT, writable=False)
    secret = access.one_time_path.removeprefix(security.OPEN)

    cookie = access.redeem(secret)

    assert cookie is not None
    assert access.admits(cookie.partition(";")[0])
    assert access.redeem(secret) is None
    assert access.one_time_path.removeprefix(security.OPEN) != secret
    assert re.search("; HttpOnly; SameSite=Strict$", cookie)


def test_tokens_differ_from_start_to_start() -> None:
    one, other = Access([], PORT, writable=False), Access([], PORT, writable=False)
    assert not one.admits(cookie_of(other))
    assert one.one_time_path != other.one_time_path


def test_only_the_given_names_are_ours() -> None:
    access = Access(["box.lan"], PORT, writable=False)

    def check(host: bytes) -> Refusal | None:
        return security.check_host(Arrived("GET", b"/", b"", [(b"host", host)], access))

    assert check(b"box.lan:8642") is None
    assert check(b"BOX.LAN:8642") is None
    assert check(b"[::1]:8642") is None
    assert check(b"other.lan:8642") is not None
