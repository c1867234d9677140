"""`holdfast metrics`: metrics of a repository, for monitoring."""

from __future__ import annotations

import click

from holdfast.cli.options import json_option, repo_option
from holdfast.cli.output import Output
from holdfast.cli.repository import open_repository


@click.command()
@repo_option
@json_option
@click.pass_obj
def metrics(output: Output, *, repo: str | None) -> None:
    """Print metrics of the repository in Prometheus' text format.

    Counters of audit entries, snapshots, landings, events and expired leases come from the audit trail and the events
    of issues. The first call reads both from the beginning; later calls on the same machine read only new entries. Each
    process adds its commits, conflicts and waits for locks when it ends. Gauges show queues, issues, leases, claims
    and waiters as they are now. If the store is unusable, the command prints 'holdfast_store_up 0' and exits with
    status 0.

    \b
    Examples:
      holdfast metrics
      holdfast metrics --repo /srv/project > holdfast.prom
    """
    from holdfast.repository.metrics import as_text, measure

    found = measure(open_repository(repo, to_examine=True))
    output.result({"metrics": [each.as_record() for each in found]}, as_text(found).splitlines())
