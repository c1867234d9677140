"""`holdfast doctor`: what is wrong with a repository, what that means, and repairing it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import click

from holdfast.cli.options import json_option
from holdfast.cli.output import Output
from holdfast.cli.repository import open_repository, repo_option

if TYPE_CHECKING:
    from holdfast.findings import Finding, Repaired


@click.command("doctor", short_help="Find out what is wrong with a repository, and repair it.")
@click.option("--strict", is_flag=True, help="Read every file of every snapshot, and try the filesystem.")
@click.option("--fix", is_flag=True, help="Repair what can be repaired without risk.")
@repo_option
@json_option
@click.pass_obj
def doctor(output: Output, *, strict: bool, fix: bool, repo: str | None) -> None:
    """Examine the repository: each finding says what it means, and what --fix would do about it.

    Without --fix nothing is changed. With it, what dead processes have begun is brought to its end,
    and what they left behind is removed. Nothing that users have made is ever deleted. The status
    is 0 if there is nothing but notes, and 6 if something is wrong. If the server that has the records
    cannot be used, that is a finding, and so is which checks could not be made without it.

    \b
    Examples:
      holdfast doctor
      holdfast doctor --strict --json
      holdfast doctor --fix
    """
    repository = open_repository(repo, to_examine=True)
    if fix:
        _tell_repairs(output, repository.repair(strict=strict))
    else:
        _tell(output, repository.examine(strict=strict), {}, [])


def _tell_repairs(output: Output, repaired: Repaired) -> None:
    lines = [f"repaired  {each.code} {each.subject}: {each.remedy}" for each in repaired.fixed]
    lines += [f"failed    {each.code} {each.subject}: {why.message}" for each, why in repaired.failed]
    record: dict[str, object] = {
        "fixed": [each.as_record() for each in repaired.fixed],
        "failed": [{**each.as_record(), "error": why.as_record()} for each, why in repaired.failed],
    }
    _tell(output, repaired.remaining, record, lines)


def _tell(
    output: Output, findings: Sequence[Finding], record: dict[str, object], lines: Sequence[str]
) -> None:
    from holdfast.cli.output import CommandFailed
    from holdfast.errors import Unhealthy
    from holdfast.findings import is_wrong

    record = {**record, "findings": [each.as_record() for each in findings]}
    told = [*lines, *_lines(findings)]
    if not is_wrong(findings):
        output.result({"healthy": True, **record}, [*told, "The repository is healthy."])
        return
    if not output.as_json:
        output.result({}, told)
    counts = Counter(each.severity.value for each in findings)
    summary = ", ".join(f"{count} {name}{'s' if count > 1 else ''}" for name, count in counts.items())
    raise CommandFailed(Unhealthy(f"the repository is not healthy: {summary}", record))


def _lines(findings: Sequence[Finding]) -> Iterator[str]:
    for each in findings:
        yield f"{each.severity.value:<8}  {each.code}: {each.message}"
        yield f"          {each.meaning}"
        yield f"          --fix: {each.remedy}"
