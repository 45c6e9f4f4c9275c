"""``kedge tree``: the chain as a graph, with forks, heads, and what became of each response."""

import time
from typing import TYPE_CHECKING, Any

import click

from kedge.cli.frame import command as kedge_command
from kedge.cli.graph import draw
from kedge.cli.output import dim, say, say_json
from kedge.cli.stored import conversation_argument, find_conversation, store_option, with_store
from kedge.cli.words import short_id

if TYPE_CHECKING:
    from kedge.cli.trees import Tree

WIDEST = 15
"""How many columns of lanes are lined up; what is wider stands out."""
SIGNS = {"root": "◇", "failed": "✗", "compacted": "◆", "edited": "◆", "merged": "◆"}
MARKS = {"expired": "yellow", "lost": "yellow", "failed": "red", "unstored": "yellow"}


@kedge_command("tree", short_help="Show the chain of a conversation as a graph.")
@conversation_argument
@click.option(
    "--limit", type=click.IntRange(0), default=0, help="Only the newest nodes.  [default: all]"
)
@store_option
def command(conversation: str, limit: int, store: str, as_json: bool) -> None:
    """Show the tree of a conversation, the newest node first.

    Forks of it are lanes of the same tree. Marks tell which responses expired, were lost or failed, and
    where history was compacted or edited.
    """
    from kedge.cli.trees import load_tree

    async def work(opened: Any) -> "Tree":
        return await load_tree(opened, await find_conversation(opened, conversation))

    tree = with_store(work, given=store)
    if as_json:
        say_json(tree.report(time.time()))
        return
    for line in lines(tree, time.time(), limit):
        say(line)


def lines(tree: "Tree", now: float, limit: int = 0) -> list[str]:
    """The graph, a line a row."""
    shown = sorted(tree.nodes.values(), key=lambda node: -node.id)
    if limit:
        shown = shown[:limit]
    signs = {node.id: SIGNS[node.kind] for node in shown if node.kind in SIGNS}
    rows = list(draw(((node.id, node.parent) for node in shown), signs))
    width = max((len(row.lanes) for row in rows if len(row.lanes) <= WIDEST), default=0)
    return [
        row.lanes if row.node is None else f"{row.lanes:<{width}}  {_told(tree, row.node, now)}"
        for row in rows
    ]


def _told(tree: "Tree", number: int, now: float) -> str:
    node, response = tree.nodes[number], tree.responses.get(number)
    parts = [dim(str(number)), node.kind]
    if response and response.provider_response_id:
        parts.append(dim(short_id(response.provider_response_id)))
    for mark in tree.marks(number, now):
        color = MARKS.get(mark.partition(":")[0], "cyan")
        parts.append(click.style(f"[{mark}]", fg=color))
    parts += [click.style(f"({name})", fg="green", bold=True) for name in tree.heads(number)]
    if excerpt := tree.excerpt(number):
        parts.append(excerpt)
    return " ".join(parts)
