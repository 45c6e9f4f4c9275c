"""The pages, drawn on the server: readable without any script."""

from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import parse_qs, urlencode

from pydantic import ValidationError
from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response
from starlette.routing import Route

from kedge.store.overview import Overview
from kedge.web import words
from kedge.web.dashboard import beat, look, stream_figures
from kedge.web.desk import Desk, overview_status
from kedge.web.figures import DEFAULT_RANGE, RANGES
from kedge.web.finding import find_conversations
from kedge.web.models import ListQuery
from kedge.web.operations import read_body
from kedge.web.rendering import page, render, static_file
from kedge.web.runs import view_of
from kedge.web.security import COOKIE, SESSION_SECONDS, Terms
from kedge.web.views import Choice, ConversationList, ConversationRow
from kedge.workflows import list_workflows, load_workflow

ROWS = 50
MOST_WORKFLOWS = 200
MOST_FORM = 10_000

_SHOWN = {
    "active": "Active",
    "forked": "Forked",
    "failed": "With failures",
    "archived": "Archived",
    "all": "All",
}
_ORDERS = {
    "newest": "Newest first",
    "oldest": "Oldest first",
    "turns": "Most turns",
    "tokens": "Most tokens",
    "cost": "Highest cost",
    "title": "By title",
}


def desk_of(request: Request) -> Desk:
    """The desk of the app that a request came to."""
    return request.app.state.desk


async def conversations(request: Request) -> Response:
    """The list of conversations."""
    desk = desk_of(request)
    try:
        given = {k: v for k, v in request.query_params.items() if v and k != "limit"}
        asked = ListQuery.model_validate({**given, "limit": ROWS})
    except ValidationError:
        return RedirectResponse("/", 303)
    rows, total = await find_conversations(desk.store, asked)
    if not rows and asked.offset:
        return RedirectResponse(_url(asked, offset=0), 303)
    kept = [("show", asked.show), ("order", asked.order)]
    return page(
        "conversations.html",
        here="conversations",
        list=_listed(rows, total, asked, desk.clock()),
        kept=[each for each in kept if each[1] not in ("active", "newest")],
        narrowed=asked.show != "active" or asked.tag is not None,
        base_url=request.app.state.base_url,
    )


def _listed(rows: Sequence[Overview], total: int, asked: ListQuery, now: float) -> ConversationList:
    before, after = asked.offset - ROWS, asked.offset + ROWS
    return ConversationList(
        rows=tuple(_row(each, now) for each in rows),
        total=total,
        first=asked.offset + 1,
        query=asked.q,
        filters=_choices(_SHOWN, asked, "show"),
        orders=_choices(_ORDERS, asked, "order"),
        previous=_url(asked, offset=max(before, 0)) if asked.offset else "",
        next=_url(asked, offset=after) if after < total else "",
    )


def _choices(names: Mapping[str, str], asked: ListQuery, member: str) -> tuple[Choice, ...]:
    chosen = getattr(asked, member)
    return tuple(
        Choice(title, _url(asked, **{member: name}, offset=0), name == chosen)
        for name, title in names.items()
    )


def _url(asked: ListQuery, **changes: Any) -> str:
    changed = asked.model_copy(update=changes)
    given = changed.model_dump(exclude_defaults=True, exclude={"limit"})
    return f"/?{urlencode(given)}" if given else "/"


def _row(each: Overview, now: float) -> ConversationRow:
    return ConversationRow(
        id=each.row.id,
        name=each.row.title,
        first_words=each.first_words,
        last_answer=each.last_answer,
        turns=each.responses,
        forks=each.forks,
        tokens=each.input_tokens + each.output_tokens,
        cached_share=words.share(each.cached_tokens, each.input_tokens),
        cost=each.cost,
        latency=each.seconds,
        status=overview_status(each, now),
        expires_at=each.expires_at,
        updated_at=each.row.updated_at,
        tags=each.row.tags,
        model=each.model,
    )


async def conversation(request: Request) -> Response:
    """One conversation: its chain, and the path to the chosen response."""
    asked = request.query_params
    view = await desk_of(request).view(
        request.path_params["id"],
        asked.get("at", ""),
        frozenset(asked.getlist("unfold")),
        whole="all" in asked,
    )
    return page("conversation.html", here="conversations", view=view)


async def compare(request: Request) -> Response:
    """Two branches side by side."""
    asked = request.query_params
    view = await desk_of(request).compare(
        request.path_params["id"], asked.get("left", ""), asked.get("right", "")
    )
    return page("compare.html", here="conversations", view=view)


async def plan(request: Request) -> Response:
    """What one request sent, and why: as a page, or as the part of one."""
    name, node = request.path_params["id"], request.path_params["node"]
    card = await desk_of(request).card(name, node)
    if "part" in request.query_params:
        return HTMLResponse(render("plan.html", card=card))
    return page("plan_page.html", here="conversations", card=card, id=name, node=node)


async def dashboard(request: Request) -> Response:
    """The figures of a range of time."""
    chosen = request.query_params.get("range", DEFAULT_RANGE)
    chosen = chosen if chosen in RANGES else DEFAULT_RANGE
    return page("dashboard.html", here="dashboard", view=await look(desk_of(request), chosen))


async def live(request: Request) -> Response:
    """The same figures again, whenever something happened."""
    chosen = request.query_params.get("range", DEFAULT_RANGE)
    chosen = chosen if chosen in RANGES else DEFAULT_RANGE
    desk = desk_of(request)
    seen = request.query_params.get("seen") or await beat(desk)
    return stream_figures(desk, chosen, seen, request.app.state.stopping)


async def workflows(request: Request) -> Response:
    """Every workflow, the one that changed last first."""
    rows = await list_workflows(desk_of(request).store, limit=MOST_WORKFLOWS)
    return page("workflows.html", here="workflows", rows=rows)


async def workflow(request: Request) -> Response:
    """One workflow: what was said in each round, and what was thought of it."""
    found = await load_workflow(desk_of(request).store, request.path_params["id"])
    return page("workflow.html", here="workflows", view=view_of(found))


async def login(_: Request) -> Response:
    """The form at the door."""
    return page("login.html", here="login", wrong=False)


async def enter(request: Request) -> Response:
    """Take the token, and give a session for it."""
    terms: Terms = request.app.state.terms
    form = parse_qs((await read_body(request, MOST_FORM)).decode("utf-8", "replace"))
    if not terms.is_token(form.get("token", [""])[0].strip()):
        return page("login.html", here="login", status=403, wrong=True)
    entered = RedirectResponse("/", 303)
    entered.set_cookie(
        COOKIE,
        terms.session(),
        max_age=SESSION_SECONDS,
        httponly=True,
        samesite="strict",
        secure=request.url.scheme == "https",
    )
    return entered


async def static(request: Request) -> Response:
    """One of our own files."""
    return static_file(request)


ROUTES = [
    Route("/", conversations),
    Route("/conversations/{id}", conversation),
    Route("/conversations/{id}/compare", compare),
    Route("/conversations/{id}/plans/{node:int}", plan),
    Route("/dashboard", dashboard),
    Route("/dashboard/live", live),
    Route("/workflows", workflows),
    Route("/workflows/{id}", workflow),
    Route("/login", login, methods=["GET"]),
    Route("/login", enter, methods=["POST"]),
    Route("/static/{name}", static),
]
"""Every page, as it stands in the documentation."""
