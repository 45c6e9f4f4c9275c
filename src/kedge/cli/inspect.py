"""``kedge inspect``: every block, what the server remembers of it, what would be sent now, and why."""

from typing import TYPE_CHECKING, Any

import click

from kedge.cli.frame import command as kedge_command
from kedge.cli.output import dim, say, say_json, table
from kedge.cli.stored import (
    conversation_argument,
    find_conversation,
    find_place,
    model_for,
    model_option,
    store_option,
    with_store,
)
from kedge.cli.words import plural, printable, share, short_id
from kedge.config import mask_url

if TYPE_CHECKING:
    from kedge.cli.inspecting import Inspection
    from kedge.store import Store

EXCERPT = 80


@kedge_command("inspect", short_help="Show every block, and what would be sent now, and why.")
@conversation_argument
@click.option("--at", default="head", help="A node or a response of its tree, instead of the head.")
@click.option("--say", "said", default="", help="Inspect it as if this had been said.")
@model_option
@store_option
def command(
    conversation: str, at: str, said: str, model: str | None, store: str, as_json: bool
) -> None:
    """Show every block with its response, its origin and its tokens; then the plan.

    The plan is what the next request would be: the anchor it would build on, what would be sent, why each
    newer candidate is refused, and what is saved. Nothing is sent.
    """
    from kedge.cli.inspecting import inspect

    async def work(opened: "Store") -> "Inspection":
        row = await find_conversation(opened, conversation)
        node = await find_place(opened, row, at)
        return await inspect(opened, row, node.id, model_for(row, model), said)

    found = with_store(work, given=store)
    if as_json:
        say_json(found.report())
        return
    _show_blocks(found)
    say()
    say(found.plan.explain())
    say(dim(_saved(found)))


def _show_blocks(found: "Inspection") -> None:
    from kedge.turns.show import describe

    rows: list[tuple[Any, ...]] = []
    for number, (block, tokens) in enumerate(zip(found.turn.blocks, found.tokens, strict=True)):
        place = "→" if block.id in found.sent else "·"
        rows.append(
            (
                f"{place} {number}",
                block.kind,
                block.origin,
                f"{tokens:,}",
                short_id(block.response_id) or "",
                describe(block, EXCERPT),
            )
        )
    say(
        f"{printable(found.row.title or found.row.id)}, node {found.node}, {plural(len(rows), 'block')}, "
        f"{plural(sum(found.tokens), 'token')}; {dim('→ would be sent to ' + mask_url(found.model))}"
    )
    say()
    table(("block", "kind", "origin", "tokens", "response", "content"), rows)


def _saved(found: "Inspection") -> str:
    plan = found.plan
    saved = plan.full_bytes - plan.delta_bytes
    return (
        f"Saved: {saved:,} of {plan.full_bytes:,} bytes ({share(saved, plan.full_bytes) or '0 %'}); "
        f"{found.saved_tokens:,} of {found.full_tokens:,} tokens are not sent again "
        "(a provider still bills them as input)."
    )
