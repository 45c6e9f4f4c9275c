"""The pages, rendered on the server and readable without JavaScript."""

from functools import partial
from typing import Any
from urllib.parse import parse_qs, urlencode

from pydantic import ValidationError
from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response

from kedge.chaining.rewrite import PASS_THROUGH_REASONS
from kedge.errors import StoreError
from kedge.server.sse import EventStreamResponse
from kedge.store.summaries import list_labels
from kedge.web import dashboard, security
from kedge.web.api import read_attachment
from kedge.web.openapi import ApiCall, IdRoute, read_body
from kedge.web.page_templates import render, render_page, serve_static
from kedge.web.schemas import ListQuery
from kedge.web.server_requests import flush_requests, load_request, read_message
from kedge.web.service import get_service
from kedge.web.workflow_runs import list_known_workflows, load_known_workflow
from kedge.workflows.roles import JUDGE_ROLE

PAGE_SIZE = 50
MAX_FORM_BYTES = 10_000
MAX_RECENT = 20
"""The number of conversations listed beside a conversation."""
MAX_DIGITS = 18
"""The maximum number of digits that are parsed of a row number, which is more than any row number has."""
MAX_LISTED_BODY = 100_000
"""The maximum size of a request whose message is shown in the list of requests."""
MAX_CHAIN = 50
"""The maximum number of requests shown before and after a request of another program."""


async def conversations(request: Request) -> Response:
    """Render the list of conversations."""
    service = get_service(request)
    try:
        parameters = {name: value for name, value in request.query_params.items() if value}
        query = ListQuery.model_validate({**parameters, "limit": PAGE_SIZE})
    except ValidationError:
        return RedirectResponse("/", 303)
    rows, total, hits = await service.find(query)
    if not rows and query.offset:
        return RedirectResponse(_list_url(query, offset=0), 303)
    return await render_page(
        request,
        "conversations.html",
        section="conversations",
        query=query,
        rows=[(row, service.status(row)) for row in rows],
        total=total,
        hits=hits,
        labels=await list_labels(service.store),
        list_url=partial(_list_url, query),
        base_url=request.app.state.base_url,
    )


def _list_url(query: ListQuery, **changes: Any) -> str:
    changed = query.model_copy(update=changes)
    parameters = changed.model_dump(exclude_defaults=True, exclude={"limit"})
    if not parameters:
        return "/"
    return f"/?{urlencode(parameters)}"


async def conversation(request: Request) -> Response:
    """Render a conversation: its response tree, and the path to the chosen response."""
    query = request.query_params
    service = get_service(request)
    view = await service.load_view(
        request.path_params["id"],
        query.get("at", ""),
        frozenset(_parse_number(node) for node in query.getlist("unfold")),
        show_all="all" in query or "block" in query,
        block=query.get("block", ""),
    )
    recent, _, _ = await service.find(ListQuery.model_validate({"limit": MAX_RECENT}))
    return await render_page(
        request, "conversation.html", section="conversations", view=view, recent=recent
    )


async def attachment(request: Request) -> Response:
    """Serve an attachment of a message."""
    return await read_attachment(ApiCall(get_service(request), request))


async def compare(request: Request) -> Response:
    """Render two branches side by side."""
    query = request.query_params
    view = await get_service(request).compare(
        request.path_params["id"], query.get("left", ""), query.get("right", "")
    )
    return await render_page(request, "compare.html", section="conversations", view=view)


async def plan(request: Request) -> Response:
    """Render the plan of one request, as a page or as a part of one."""
    name = request.path_params["id"]
    node = request.path_params["node"]
    card = await get_service(request).load_plan_card(name, node)
    if "part" in request.query_params:
        return HTMLResponse(render("plan.html", card=card))
    return await render_page(
        request, "plan_page.html", section="conversations", card=card, id=name, node=node
    )


async def show_dashboard(request: Request) -> Response:
    """Render the dashboard."""
    view = await dashboard.build_dashboard(get_service(request), _read_range(request))
    return await render_page(
        request, "dashboard.html", section="dashboard", view=view, ranges=dashboard.RANGES
    )


async def stream_dashboard(request: Request) -> Response:
    """Stream the figures of the dashboard after every change."""
    service = get_service(request)
    seen = request.query_params.get("seen") or await dashboard.read_change_token(service)
    figures = dashboard.iter_figures(
        service, _read_range(request), seen, request.app.state.stopping
    )
    return EventStreamResponse(figures)


def _read_range(request: Request) -> str:
    range_name = request.query_params.get("range", "")
    if range_name in dashboard.RANGES:
        return range_name
    return dashboard.DEFAULT_RANGE


async def workflows(request: Request) -> Response:
    """Render the list of workflows, the most recently changed first."""
    service = get_service(request)
    rows = await list_known_workflows(service)
    return await render_page(
        request, "workflows.html", section="workflows", rows=rows, models=service.models.names
    )


async def workflow(request: Request) -> Response:
    """Render a workflow with its rounds and verdicts."""
    service = get_service(request)
    name = request.path_params["id"]
    loaded = await load_known_workflow(service, name)
    columns = [chain for chain in loaded.chains if chain.role != JUDGE_ROLE]
    if loaded.kind != "debate":
        columns = columns[:1]
    return await render_page(
        request,
        "workflow.html",
        section="workflows",
        workflow=loaded,
        sides=columns,
        running=bool(service.runs.list(name)),
    )


def _parse_number(text: str) -> int:
    """Return a row number of a query string, or 0, which no row has."""
    if not text.isdecimal():
        return 0
    return int(text[:MAX_DIGITS])


async def list_requests(request: Request) -> Response:
    """Render the requests of other programs, to this server or through a proxy with this store."""
    await flush_requests(request)
    store = get_service(request).store
    before = _parse_number(request.query_params.get("before", ""))
    rows = await store.list_proxied(limit=PAGE_SIZE, before=before, body_bytes=MAX_LISTED_BODY)
    return await render_page(
        request,
        "requests.html",
        section="requests",
        base_url=request.app.state.base_url,
        rows=rows,
        read_message=read_message,
        totals=await store.sum_proxied(),
        older=rows[-1].id if len(rows) == PAGE_SIZE else 0,
    )


async def show_request(request: Request) -> Response:
    """Render the plan of a request of another program, and its chain."""
    row, before, after = await load_request(request, get_service(request).store)
    return await render_page(
        request,
        "request.html",
        section="requests",
        row=row,
        reason=PASS_THROUGH_REASONS.get(row.reason, row.reason),
        before=before[-MAX_CHAIN:],
        omitted=max(len(before) - MAX_CHAIN, 0),
        after=after[:MAX_CHAIN],
    )


async def login(request: Request) -> Response:
    """Render the login form."""
    return await render_page(request, "login.html", section="login", problem="")


async def submit_login(request: Request) -> Response:
    """Check the token and start a session."""
    auth: security.PageAuth = request.app.state.auth
    form = parse_qs((await read_body(request, MAX_FORM_BYTES)).decode("utf-8", "replace"))
    throttle: security.LoginThrottle = request.app.state.login_throttle
    address = request.client.host if request.client else ""
    wait = throttle.count_attempt(address)
    if wait:
        problem = f"Too many failed attempts. Try again in {wait} seconds."
        answer = await render_page(
            request, "login.html", section="login", status=429, problem=problem
        )
        answer.headers["retry-after"] = str(wait)
        return answer
    try:
        session = await auth.log_in(form.get("token", [""])[0].strip())
    except StoreError:
        throttle.forget(address)
        raise
    if session is None:
        return await render_page(
            request, "login.html", section="login", status=403, problem="Wrong token."
        )
    throttle.forget(address)
    response = RedirectResponse("/", 303)
    response.set_cookie(
        security.SESSION_COOKIE,
        session,
        max_age=security.SESSION_SECONDS,
        httponly=True,
        samesite="strict",
        secure=request.url.scheme == "https",
    )
    return response


async def log_out(request: Request) -> Response:
    """End the session of a browser."""
    auth: security.PageAuth = request.app.state.auth
    session = security.read_session_cookie(request.headers)
    if session:
        await auth.log_out(session)
    response = RedirectResponse("/login", 303)
    response.delete_cookie(security.SESSION_COOKIE)
    return response


ROUTES = [
    IdRoute("/", conversations),
    IdRoute("/conversations/{id}", conversation),
    IdRoute("/conversations/{id}/attachments/{block}/{index:number}", attachment),
    IdRoute("/conversations/{id}/compare", compare),
    IdRoute("/conversations/{id}/plans/{node:number}", plan),
    IdRoute("/dashboard", show_dashboard),
    IdRoute("/dashboard/live", stream_dashboard),
    IdRoute("/workflows", workflows),
    IdRoute("/workflows/{id}", workflow),
    IdRoute("/requests", list_requests),
    IdRoute("/requests/{number:number}", show_request),
    IdRoute("/login", login, methods=["GET"]),
    IdRoute("/login", submit_login, methods=["POST"]),
    IdRoute("/logout", log_out, methods=["POST"]),
    IdRoute("/static/{name}", serve_static),
]
"""All pages; the documentation has the same list."""
