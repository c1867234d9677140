"""`holdfast web`: pages about repositories, for a browser on this machine."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from holdfast.cli import ACTOR, REPO
from holdfast.cli.options import actor_option, data_dir_option, store_address, with_output
from holdfast.cli.output import Output
from holdfast.cli.repository import current_directory
from holdfast.errors import ExtraMissing, UsageFailure

if TYPE_CHECKING:
    from holdfast.web.server import WebServer
    from holdfast.web.workspaces import Workspace


@click.command(short_help="Show the work in a browser.")
@click.argument("directories", metavar="[DIR]...", nargs=-1)
@click.option(
    "--port",
    metavar="N",
    type=click.IntRange(0, 65535),
    default=8642,
    show_default=True,
    help="The port; 0 picks a free one.",
)
@click.option("--host", metavar="ADDRESS", default="127.0.0.1", show_default=True, help="The address to listen on.")
@click.option(
    "--allow-host", "names", metavar="HOST", multiple=True, help="A host name that browsers may use. Repeatable."
)
@click.option("--open", "open_browser", is_flag=True, help="Open the pages in your browser.")
@click.option("--writable/--read-only", default=False, help="Allow actions.  [default: --read-only]")
@click.option("--export", "export_file", metavar="FILE.html", help="Write the pages to one file, and do not serve.")
@actor_option("human:USER")
@data_dir_option
@with_output
def web(
    output: Output,
    *,
    directories: tuple[str, ...],
    port: int,
    host: str,
    names: tuple[str, ...],
    open_browser: bool,
    writable: bool,
    export_file: str | None,
    actor: str | None,
    data_dir: str | None,
) -> None:
    """Show the agents and their work in a browser, with everything that is stuck, waiting or landed. The pages are
    live: they update as the records change.

    Without DIR, the pages show the repository around the current directory. The server listens on this machine only,
    and changes nothing without --writable. The address that it prints works once, and gives access to the browser that
    opens it. The command needs an extra: pip install 'holdfast[web]'.

    With --export, the command writes the pages, but no diffs, to one file that needs no server, and exits.

    \b
    Examples:
      holdfast web --open
      holdfast web --writable --port 0 project other-project
      holdfast web --export today.html
    """
    _require_extra()
    workspaces = _workspaces(directories, actor, data_dir)
    if export_file is not None:
        _export(output, workspaces, export_file)
        return
    from holdfast.web.server import ServerOptions, WebServer

    server = WebServer(workspaces, ServerOptions(host, port, names, writable))

    redirect = contextlib.ExitStack()

    def ready() -> None:
        record = {
            "url": server.one_time_address,
            "port": server.port,
            "writable": writable,
            "metrics_token": server.access.scraper_token,
        }
        shown = ", ".join(str(each.place) for each in workspaces)
        mode = "Actions are allowed." if writable else "The pages are read-only; --writable allows actions."
        lines = [f"Showing {shown}. {mode}", f"Open {server.one_time_address}", "Press Ctrl-C to stop."]
        output.result(record, lines)
        if open_browser:
            redirect.callback(_open_browser(server, workspaces[0].settings.data_directory))

    def used() -> None:
        redirect.close()
        output.diagnostic(f"A browser has access. For another browser, open {server.one_time_address}")

    with redirect, contextlib.suppress(KeyboardInterrupt):  # the usual way to stop it
        server.run(ready=ready, used=used)


def _require_extra() -> None:
    try:
        import starlette
        import uvicorn
    except ImportError as error:
        raise ExtraMissing(
            f"cannot load a package that the pages need: {error}",
            hint="Install it: pip install 'holdfast[web]'.",
            extra="web",
        ) from error
    del starlette, uvicorn


def _workspaces(directories: Sequence[str], actor: str | None, data_dir: str | None) -> list[Workspace]:
    from holdfast.fs.names import checked_actor
    from holdfast.locks.identity import current_holder
    from holdfast.repository.overview import check_workspace, find_workspace
    from holdfast.store.approvals import data_directory
    from holdfast.web.workspaces import WorkspaceSettings, workspaces_of

    named = actor or os.environ.get(ACTOR) or f"human:{current_holder().user.replace(' ', '_') or 'unknown'}"
    address = store_address(os.environ)
    chosen = directories or tuple(filter(None, [os.environ.get(REPO)]))
    if len(chosen) > 1 and address is not None:
        raise UsageFailure("HOLDFAST_STORE names one store, but you named several directories", hint="Unset it.")
    roots = []
    for each in chosen:
        root = Path(os.path.abspath(each))
        if address is None:
            check_workspace(root)
        roots.append(find_workspace(root))
    home = Path(os.path.expanduser("~"))
    settings = WorkspaceSettings(checked_actor(named), address, data_directory(data_dir, os.environ), home)
    return workspaces_of(roots or [find_workspace(current_directory())], settings)


def _open_browser(server: WebServer, place: Path) -> Callable[[], object]:
    """Open the one-time address in the browser, by a private file: every user can read the arguments of a process.
    Returns the function that removes the file."""
    import webbrowser

    from holdfast.fs import durable
    from holdfast.fs.directory import make_directories
    from holdfast.web.layout import redirecting

    path = place / f"open-{server.port}.html"
    make_directories(place, mode=0o700)
    durable.replace(path, redirecting(server.one_time_address), mode=0o600)
    webbrowser.open(path.as_uri())
    return partial(durable.remove, path)


def _export(output: Output, workspaces: Sequence[Workspace], name: str) -> None:
    from holdfast.web.export import export_pages

    path = Path(os.path.abspath(name))
    size = export_pages(workspaces, path)
    output.result({"path": str(path), "bytes": size}, [f"Wrote {path} ({size} bytes)."])
