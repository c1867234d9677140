"""What is stored about the claim of an issue: who works on it until when, and the count of its tokens."""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from holdfast.clock import BootMark, Now
from holdfast.errors import SettingInvalid


class Claim(msgspec.Struct, frozen=True, kw_only=True):
    """A timed right to work on an issue. It counts until `expires_at`, by the store's clock; within one boot
    of one machine until `boot_expires_at`, which nobody can move by setting a clock.

    `claim_id` is `<issue>.<token>.<random>`: it says which issue it is for and is never used again.
    """

    claim_id: str
    assignee: str
    token: int
    ttl: float
    claimed_at: str
    renewed_at: str
    expires_at: str
    purpose: str = ""
    holder: dict[str, str] = {}
    """The process that took it, in words, if that is known; see `locks.holders.described`."""

    boot_expires_at: BootMark | None = None

    def time_left(self, moment: Now, *, for_others: bool) -> float:
        """How long the claim still counts: for its holder, or (with a margin) until others may take it."""
        return moment.until(self.expires_at, self.boot_expires_at, margin=for_others)

    def is_expired(self, moment: Now) -> bool:
        """Whether its holder must not use it any more."""
        return self.time_left(moment, for_others=False) <= 0

    def may_be_taken(self, moment: Now) -> bool:
        """Whether others may take its place: never before it has expired for its holder."""
        return self.time_left(moment, for_others=True) <= 0


class ClaimRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The claim of an issue, if there is one. The token outlives it: it only ever grows."""

    issue_id: str
    token: int
    claim: Claim | None = None


class ClaimId(NamedTuple):
    """A claim id, taken apart."""

    issue_id: str
    token: int
    text: str

    @classmethod
    def parse(cls, text: str) -> ClaimId:
        issue_id, token, secret = ["", "", *text.strip().rsplit(".", 2)][-3:]
        if not (issue_id and secret and token.isascii() and token.isdigit() and len(token) < 16):
            raise SettingInvalid("the claim", text, "the id of a claim, as 'holdfast issue claim' prints it")
        return cls(issue_id, int(token), text.strip())
