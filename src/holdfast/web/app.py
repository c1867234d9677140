"""The application: from addresses to pages, parts of pages, static files, events and actions."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from functools import partial

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect, Request
from starlette.responses import RedirectResponse, Response, StreamingResponse
from starlette.routing import Route

from holdfast.errors import ExitStatus, Failure, NotFound
from holdfast.repository.metrics import as_text, measure
from holdfast.web import actions
from holdfast.web.contents import PAGES, PARTS
from holdfast.web.html import Html, document, h
from holdfast.web.layout import Page, PageRequest, address, command_line, framed, path_of, plain_page, static_files
from holdfast.web.live import Live
from holdfast.web.security import EVENTS, Access, Refusal
from holdfast.web.workspaces import Workspace, workspace_named

_STATUSES = {
    ExitStatus.USAGE: 400,
    ExitStatus.NOT_FOUND: 404,
    ExitStatus.CONFLICT: 409,
    ExitStatus.FENCED: 409,
    ExitStatus.REFUSED: 403,
    ExitStatus.TIMED_OUT: 503,
}
_TYPES = {"css": "text/css", "js": "text/javascript", "svg": "image/svg+xml", "txt": "text/plain"}
_HTML = "text/html; charset=utf-8"
_PROMETHEUS = "text/plain; version=0.0.4; charset=utf-8"


def application(workspaces: Sequence[Workspace], access: Access, live: Live) -> Starlette:
    """The application for these workspaces. It trusts that `Secured` has checked the request."""
    served = _Served(workspaces, access, live)
    routes = [
        Route("/", served.home),
        Route("/open/{secret}", served.open, methods=["GET"]),
        Route("/static/{name}", served.static),
        Route(EVENTS, served.events),
        Route("/metrics", served.metrics),
        Route("/r/{workspace}", served.workspace),
        Route("/r/{workspace}/metrics", served.metrics),
        Route("/r/{workspace}/do/{action}", served.act, methods=["POST"]),
        Route("/r/{workspace}/{page}", served.page),
        Route("/r/{workspace}/{page}/{name}", served.page),
    ]
    return Starlette(routes=routes, exception_handlers={Failure: _failed, 404: _missing, 405: _missing, 500: _broken})


class _Served:
    def __init__(self, workspaces: Sequence[Workspace], access: Access, live: Live) -> None:
        self._workspaces = workspaces
        self._access = access
        self._live = live

    async def home(self, request: Request) -> Response:
        if len(self._workspaces) == 1:
            return RedirectResponse(path_of(self._workspaces[0], "overview"), 303)
        return await run_in_threadpool(self._list)

    def _list(self) -> Response:
        rows = [
            h(
                "li",
                h(
                    "a",
                    h("strong", each.label),
                    h("span", each.where, class_="dim"),
                    href=address(each, "overview"),
                ),
            )
            for each in self._workspaces
        ]
        return _page(plain_page("Repositories", h("ul", rows, class_="workspaces")))

    async def open(self, request: Request) -> Response:
        """Give access to a browser that opens the one-time address. A HEAD request does not use it up."""
        cookie = self._access.redeem(request.path_params["secret"]) if request.method == "GET" else None
        if cookie is None:
            refusal = Refusal(
                401, "this address was already used, or is incomplete: open the one that was printed last"
            )
            return Response(refusal_page(refusal), refusal.status, media_type=_HTML)
        request.app.state.used()
        # A redirect would belong to the page with the link, and no strict cookie is sent for a page of another site.
        page = plain_page("Welcome", h("p", h("a", "Open the pages", href="/")))
        return Response(document(page), 200, {"set-cookie": cookie, "refresh": "0; url=/"}, media_type=_HTML)

    async def static(self, request: Request) -> Response:
        name = request.path_params["name"]
        content = static_files().get(name)
        if content is None:
            raise NotFound(f"there is no file {name}")
        kind = _TYPES.get(name.rpartition(".")[2], "application/octet-stream")
        headers = {"cache-control": "private, max-age=31536000, immutable"}
        return Response(content, media_type=kind, headers=headers)

    async def events(self, request: Request) -> Response:
        return StreamingResponse(self._live.events(), media_type="text/event-stream")

    async def metrics(self, request: Request) -> Response:
        """The figures of a workspace; `/metrics` is for a server that shows only one."""
        slug = request.path_params.get("workspace")
        if slug is None and len(self._workspaces) > 1:
            raise NotFound("this server shows several repositories: ask for /r/NAME/metrics")
        workspace = self._workspaces[0] if slug is None else workspace_named(self._workspaces, slug)
        return await run_in_threadpool(_measured, workspace)

    async def workspace(self, request: Request) -> Response:
        workspace = workspace_named(self._workspaces, request.path_params["workspace"])
        return RedirectResponse(path_of(workspace, "overview"), 303)

    async def page(self, request: Request) -> Response:
        name = request.path_params["page"]
        asked = self._asked(request)
        if name in PARTS:
            return await run_in_threadpool(partial(_answer_part, asked, PARTS[name]))
        if name not in PAGES:
            raise NotFound(f"there is no page {name}")
        return await run_in_threadpool(partial(_answer, asked, PAGES[name]))

    async def act(self, request: Request) -> Response:
        workspace, name = self._asked(request).workspace, request.path_params["action"]
        content = b""
        with contextlib.suppress(ClientDisconnect):
            content = await request.body()
        done = await run_in_threadpool(actions.carry_out, workspace, name, content)
        for topic in actions.TOPICS:
            self._live.tell(workspace, topic)
        return Response(done.as_json(), media_type="application/json")

    def _asked(self, request: Request) -> PageRequest:
        workspace = workspace_named(self._workspaces, request.path_params["workspace"])
        name = request.path_params.get("name", "")
        return PageRequest(
            workspace, self._workspaces, dict(request.query_params), time.time(), self._access.writable, name
        )


def _answer(asked: PageRequest, make: Callable[[PageRequest], Page]) -> Response:
    """The page; a failure is shown in the frame of the workspace, with what to do."""
    try:
        return _page(framed(asked, make(asked)))
    except Failure as failure:
        body = _problem(failure)
        return _page(framed(asked, Page("Not available", "", body)), _status(failure))


def _answer_part(asked: PageRequest, make: Callable[[PageRequest], Html]) -> Response:
    try:
        part = make(asked)
    except Failure as failure:
        part = h("span", failure.message, class_="bad")
    return Response(str(part).encode("utf-8", "backslashreplace"), media_type=_HTML)


def _measured(workspace: Workspace) -> Response:
    with workspace.repository(to_examine=True) as repository:
        return Response(as_text(measure(repository)), media_type=_PROMETHEUS)


def _page(page: Html, status: int = 200) -> Response:
    return Response(document(page), status, media_type=_HTML)


def _status(failure: Failure) -> int:
    return _STATUSES.get(failure.exit_status, 500)


def _problem(failure: Failure) -> Html:
    return h(
        "div",
        h("p", failure.message, class_="notice bad"),
        h("p", failure.hint),
        h("p", command_line(failure.code)),
        class_="empty",
    )


async def _failed(request: Request, failure: Exception) -> Response:
    assert isinstance(failure, Failure)
    if request.method == "POST":
        return Response(actions.refused(failure), _status(failure), media_type="application/json")
    return _page(plain_page("Not available", _problem(failure)), _status(failure))


async def _missing(request: Request, failure: Exception) -> Response:
    return _page(plain_page("Not found", h("p", "There is no such page. ", h("a", "Start again", href="/"))), 404)


async def _broken(request: Request, failure: Exception) -> Response:
    """A defect of ours. The server writes the traceback to its own log."""
    return _page(plain_page("Defect", h("p", f"This page failed: {type(failure).__name__}.", class_="notice bad")), 500)


def refusal_page(refusal: Refusal) -> bytes:
    """The page for a request that was refused: no scripts, no workspace, nothing of the request."""
    return document(
        plain_page("Refused", h("p", refusal.message[:1].upper() + refusal.message[1:] + ".", class_="notice bad"))
    )
