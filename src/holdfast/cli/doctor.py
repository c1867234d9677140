"""`holdfast doctor`: examine a repository, explain every finding, and repair."""

from __future__ import annotations

from collections import Counter

import click

from holdfast.cli.options import json_option, repo_option
from holdfast.cli.output import CommandFailed, Output
from holdfast.cli.progress import showing
from holdfast.cli.repository import open_repository


@click.command()
@click.option("--strict", is_flag=True, help="Read every file of every snapshot, and test the filesystem.")
@click.option("--fix", is_flag=True, help="Make every repair that carries no risk.")
@repo_option
@json_option
@click.pass_obj
def doctor(output: Output, *, strict: bool, fix: bool, repo: str | None) -> None:
    """Examine the repository. Each finding says what it means and what --fix does about it.

    Without --fix, nothing is changed. With it, unfinished operations of dead processes are completed, and their
    leftovers are removed. Users' files are never deleted. The status is 0 if there are only notes, otherwise 6. If
    the server with the records is unavailable, a finding says so and names the checks that need it.

    \b
    Examples:
      holdfast doctor
      holdfast doctor --strict --json
      holdfast doctor --fix
    """
    from holdfast.errors import Unhealthy
    from holdfast.findings import is_wrong

    repository = open_repository(repo, to_examine=True)
    record: dict[str, object] = {}
    lines: list[str] = []
    with showing("Examining", noun="snapshots", sized=False) as progress:
        repaired = repository.repair(strict=strict, progress=progress) if fix else None
        findings = repository.examine(strict=strict, progress=progress) if repaired is None else repaired.remaining
    if repaired is not None:
        lines += [f"repaired  {each.code} {each.subject}: {each.remedy}" for each in repaired.fixed]
        lines += [f"failed    {each.code} {each.subject}: {why.message}" for each, why in repaired.failed]
        record["fixed"] = [each.as_record() for each in repaired.fixed]
        record["failed"] = [{**each.as_record(), "error": why.as_record()} for each, why in repaired.failed]
    record["findings"] = [each.as_record() for each in findings]
    server = repository.server
    record["server"] = str(server) if server else None
    lines += [f"The records are kept by {server}."] if server else []
    for each in findings:
        lines += [f"{each.severity.value:<8}  {each.code}: {each.message}", f"          {each.meaning}"]
        lines.append(f"          --fix: {each.remedy}")
    if not is_wrong(findings):
        output.result({"healthy": True, **record}, [*lines, "The repository is healthy."])
        return
    if not output.as_json:
        output.result({}, lines)
    counts = Counter(each.severity.value for each in findings)
    summary = ", ".join(f"{count} {name}{'s' if count > 1 else ''}" for name, count in counts.items())
    raise CommandFailed(Unhealthy(f"the repository is not healthy: {summary}", record))
