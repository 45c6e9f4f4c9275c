"""``kedge inspect``: list the blocks of a conversation, a Turn or a chat state, and the next plan."""

import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import click

from kedge._internal.display import format_percent, pluralize, sanitize_text, shorten_id
from kedge._internal.event_loops import run_sync
from kedge.cli.base import Result, dim, echo, kedge_command, print_table, wrap_text
from kedge.cli.store_options import (
    at_option,
    configured_model,
    conversation_argument,
    find_conversation,
    find_node,
    model_option,
    resolve_model,
    run_with_store,
    store_option,
)
from kedge.compaction.base import DEFAULT_BLOCK_COUNTER
from kedge.config import mask_url
from kedge.conversation import find_anchors
from kedge.conversation.chat_state import ChatState, decode_state
from kedge.engines import Engine, ResponsesEngine, unwrap
from kedge.errors import KedgeError, NotInStore
from kedge.planning import AnchorRecord, RequestPlan, get_state, set_state
from kedge.providers import connect
from kedge.providers.clients import PRACTICE_SCOPE
from kedge.providers.practice_memory import find_missing_responses
from kedge.store import ConversationRow, RequestRecord, Store
from kedge.turns import Block, Turn, loads, user
from kedge.turns.text_format import describe
from kedge.web.shapes import shape_plan

JSON_EXCERPT_LENGTH = 200
TABLE_EXCERPT_LENGTH = 80


class InspectedBlock(NamedTuple):
    """A block, its tokens, and whether the next request would send it."""

    block: Block
    tokens: int
    is_sent: bool


@dataclass(frozen=True)
class Inspection:
    """The blocks of a conversation or a file with their tokens, and the plan for a model."""

    name: str
    """The id of the conversation, or the name of the file."""
    title: str
    subject: str
    """What was inspected: ``node 7``, ``Turn`` or ``chat state of openai``."""
    node: int | None
    model: str
    turn: Turn
    plan: RequestPlan
    last: RequestRecord | None = None
    """The newest stored request on the path."""

    @cached_property
    def blocks(self) -> list[InspectedBlock]:
        """The blocks with their tokens, and whether they would be sent."""
        # Leading system text is sent with every request. Reasoning and compactions that no response proves are
        # in the delta, and left out of the request.
        sent_ids = {block.id for block in (*self.turn.leading, *self.plan.delta)}
        sent_ids -= {block.id for block in self.plan.left_out}
        count_tokens = DEFAULT_BLOCK_COUNTER.count_block
        return [
            InspectedBlock(block, count_tokens(block), block.id in sent_ids)
            for block in self.turn.blocks
        ]

    @property
    def full_tokens(self) -> int:
        """The tokens of all blocks."""
        return sum(inspected.tokens for inspected in self.blocks)

    @property
    def saved_tokens(self) -> int:
        """The tokens of all blocks that would not be sent, also of those left out."""
        return sum(inspected.tokens for inspected in self.blocks if not inspected.is_sent)

    def to_json(self) -> dict[str, Any]:
        """Return the inspection as JSON values."""
        name_member = "file" if self.node is None else "conversation"
        plan = shape_plan(self.plan).model_dump(mode="json")
        plan |= {
            "saved_tokens": self.saved_tokens,
            "last_sent_bytes": None,
            "last_full_bytes": None,
        }
        if self.last is not None:
            plan["last_sent_bytes"] = self.last.sent_bytes
            plan["last_full_bytes"] = self.last.full_bytes
        return {
            name_member: self.name,
            "node": self.node,
            "model": mask_url(self.model),
            "blocks": [
                {
                    "id": block.id,
                    "kind": block.kind,
                    "origin": block.origin,
                    "response_id": block.response_id,
                    "tokens": tokens,
                    "sent": is_sent,
                    "content": describe(block, JSON_EXCERPT_LENGTH),
                }
                for block, tokens, is_sent in self.blocks
            ],
            "plan": plan,
        }


async def inspect_conversation(
    store: Store, row: ConversationRow, node: int, model: str, text: str = ""
) -> Inspection:
    """Plan the next request of a conversation at a node, for a model."""
    stored = (await store.load(row, node)).turn(row.id)
    settings: dict[str, Any] = {}
    if row.mode:
        settings["mode"] = row.mode
    async with connect(model, **settings) as engine:
        turn, plan = await _plan_next(engine, stored, text, store)
    last = await store.newest_response(row, node)
    return Inspection(row.id, row.title or row.id, f"node {node}", node, model, turn, plan, last)


async def inspect_file(path: Path, model: str, text: str = "") -> Inspection:
    """Plan the next request of a Turn or a chat state in a file, for a model.

    Raises:
        KedgeError: The file has neither, or its state would be discarded.
    """
    subject, stored = _read_file(path)
    async with connect(model) as engine:
        turn, plan = await _plan_next(engine, stored, text)
    return Inspection(str(path), path.name, subject, None, model, turn, plan)


def _read_file(path: Path) -> tuple[str, Turn]:
    """Return what a file has, such as ``chat state of openai``, and its Turn."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise KedgeError(f"{path} cannot be read: {error.strerror}") from error
    if _is_turn(data):
        return "Turn", loads(data)
    state = decode_state(data.strip(), provider=None)
    if isinstance(state, ChatState):
        return f"chat state of {state.provider}", state.turn()
    raise KedgeError(
        f"{path} has no Turn and no chat state that could be used: {state}; "
        "write a Turn with kedge.turns.dumps, or the bytes of ChatReply.state"
    )


def _is_turn(data: bytes) -> bool:
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        return False
    return isinstance(value, dict) and "format" in value


async def _plan_next(
    engine: Engine, turn: Turn, text: str, store: Store | None = None
) -> tuple[Turn, RequestPlan]:
    """Return the Turn of the next request with its plan."""
    if text:
        turn = turn.append(user(text))
    candidates: list[AnchorRecord] = []
    if store is not None:
        inner = unwrap(engine)
        if isinstance(inner, ResponsesEngine):
            await inner.attach_evidence(store)  # the evidence decides what is sent
        candidates = await find_anchors(store, turn, getattr(engine, "scope", ""))

    # Commands and the page stream their answers, and evidence about streams is separate.
    plan = engine.plan(turn, candidates=tuple(candidates), streaming=True)
    if plan.anchor is None or plan.anchor.scope != PRACTICE_SCOPE:
        return turn, plan

    # The practice model's server runs in this process, so whether it has the responses is known without a request.
    state = get_state(turn)
    response_ids = {record.response_id for record in (*state.anchors, *candidates)}
    missing = find_missing_responses(response_ids)
    if plan.anchor.response_id not in missing:
        return turn, plan

    # The next request would be rejected, would mark these responses as lost, and would be sent again. The plan shown
    # is that of the request that is answered.
    turn = set_state(turn, state.mark_lost(missing, PRACTICE_SCOPE))
    remaining = tuple(record for record in candidates if record.response_id not in missing)
    return turn, engine.plan(turn, candidates=remaining, streaming=True)


def _is_file_name(name: str) -> bool:
    return name.endswith(".json") or "/" in name


@kedge_command("inspect")
@conversation_argument
@at_option
@click.option("--say", "text", default="", help="Plan as if this message were sent.")
@model_option
@store_option
def command(conversation: str, at: str, text: str, model: str | None) -> Result:
    """List every block with its response, origin and tokens, then the plan of the next request.

    CONVERSATION may also be a file: a Turn as JSON, or the bytes of a chat state. Its name ends in .json or
    contains a slash.

    The plan shows the anchor, what would be sent, why each newer candidate is rejected, and what is
    saved. Nothing is sent.
    """

    async def work(opened: Store) -> Inspection:
        try:
            row = await find_conversation(opened, conversation)
        except NotInStore as error:
            if not _is_file_name(conversation):
                raise
            raise NotInStore(f"{error}; there is no file of this name either") from None
        node = await find_node(opened, row, at)
        chosen = await resolve_model(opened, row, model, node=node.id)
        return await inspect_conversation(opened, row, node.id, chosen, text)

    if _is_file_name(conversation) and Path(conversation).is_file():
        inspection = run_sync(inspect_file(Path(conversation), configured_model(model), text))
    else:
        inspection = run_with_store(work, connects_models=True)
    return Result(inspection.to_json(), lambda: _print_inspection(inspection))


def _print_inspection(inspection: Inspection) -> None:
    title = sanitize_text(inspection.title)
    subject = sanitize_text(inspection.subject)
    block_count = pluralize(len(inspection.blocks), "block")
    token_count = pluralize(inspection.full_tokens, "token")
    legend = dim(f"→ would be sent to {mask_url(inspection.model)}")
    echo(f"{title}, {subject}, {block_count}, {token_count}; {legend}")
    echo()
    rows = [_format_row(index, inspected) for index, inspected in enumerate(inspection.blocks)]
    print_table(("block", "kind", "origin", "tokens", "response", "content"), rows)
    echo()
    echo(wrap_text(inspection.plan.explain()))
    echo(dim(wrap_text(_format_savings(inspection))))


def _format_row(index: int, inspected: InspectedBlock) -> tuple[str, ...]:
    block = inspected.block
    sign = "→" if inspected.is_sent else "·"
    return (
        f"{sign} {index}",
        block.kind,
        block.origin,
        f"{inspected.tokens:,}",
        shorten_id(block.response_id),
        describe(block, TABLE_EXCERPT_LENGTH),
    )


def _format_savings(inspection: Inspection) -> str:
    sent_bytes, full_bytes = inspection.plan.sizes
    saved = full_bytes - sent_bytes
    text = (
        f"Saved: {saved:,} of {full_bytes:,} bytes ({format_percent(saved, full_bytes)}); "
        f"{inspection.saved_tokens:,} of {inspection.full_tokens:,} tokens are not resent "
        "(providers still bill them as input)."
    )
    last = inspection.last
    if last is None:
        return text
    sizes = f"{last.sent_bytes:,} of {last.full_bytes:,} bytes"
    return f"{text} The last request had {sizes}, with tools and settings."
