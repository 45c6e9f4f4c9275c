"""The desk: what the page and the API ask of a store and an engine, in one place.

Everything that is read here is read in a few queries; what takes a model happens in ``turns``.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kedge.conversation import Conversation
from kedge.engines import Engine
from kedge.errors import NotInStore
from kedge.store import ConversationRow, Node, Store
from kedge.store.overview import Overview, Tree, exchanges_at, is_expiring, tree_of
from kedge.web.chains import Chain, chain_of, sums_of
from kedge.web.layout import Layout, Sums, lay_out
from kedge.web.plans import card_of, plan_again
from kedge.web.talk import draw_exchanges, draw_said, names_of, spans_of
from kedge.web.views import Branch, Comparison, ConversationView, PlanCard

SHOWN_EXCHANGES = 40
"""How many exchanges of a path are shown unless all are asked for."""


@dataclass(frozen=True, slots=True)
class Desk:
    """A store to read, an engine to talk through, and what goes with every turn."""

    store: Store
    engine: Engine
    models: tuple[str, ...] = ()
    """The models that can be asked; the first one is, unless another is chosen."""
    settings: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Further settings of a Conversation: tools, middleware, price…"""
    clock: Callable[[], float] = time.time

    async def open(self, name: str) -> Conversation:
        """A conversation at its head, ready to talk."""
        return await Conversation.open(self.store, name, self.engine, **self.settings)

    async def view(
        self, name: str, at: str = "", unfold: frozenset[str] = frozenset(), *, whole: bool = False
    ) -> ConversationView:
        """A conversation with its graph, and the path to the chosen response."""
        row = await self.store.conversation(name)
        tree = await tree_of(self.store, row)
        chain = chain_of(tree, self.clock())
        node = find_node(tree, at) if at else row.head
        blocks = (await self.store.load(row, node)).blocks
        spans, said = spans_of(path_to(tree, node), blocks, tree.responses)
        omitted = 0 if whole else max(len(spans) - SHOWN_EXCHANGES, 0)
        chosen = str(chain.parents.get(node, 0) or "")
        layout = lay_out(chain.nodes, chosen, unfold)
        return ConversationView(
            id=row.id,
            name=row.title or _first_words(tree) or "New conversation",
            model=self._model(tree),
            models=self.models,
            status=status_of(row, tree, self.clock()),
            tags=row.tags,
            layout=layout,
            chosen=chosen,
            chosen_label=_label(chain, chosen),
            head=chain.head,
            path=draw_exchanges(spans[omitted:], blocks),
            pending=draw_said(said, blocks, names_of(blocks)),
            branches=_branches(layout),
            sums=chain.sums,
            omitted=omitted,
        )

    async def compare(self, name: str, left: str, right: str) -> Comparison:
        """Two branches side by side, from where they part."""
        row = await self.store.conversation(name)
        tree = await tree_of(self.store, row)
        chain = chain_of(tree, self.clock())
        ends = [find_node(tree, end) for end in (left, right)]
        blocks = [(await self.store.load(row, end)).blocks for end in ends]
        paths = [
            spans_of(path_to(tree, end), said, tree.responses)[0]
            for end, said in zip(ends, blocks, strict=True)
        ]
        shared = _shared([each.node.id for each in paths[0]], [each.node.id for each in paths[1]])
        own = [path[shared:] for path in paths]
        added = [sum((sums_of(each.row) for each in path), Sums()) for path in own]
        labels = [_label(chain, str(chain.parents.get(end, end))) for end in ends]
        return Comparison(
            id=row.id,
            name=row.title or _first_words(tree) or "New conversation",
            left=str(ends[0]),
            right=str(ends[1]),
            common=draw_exchanges(paths[0][:shared][-SHOWN_EXCHANGES:], blocks[0]),
            left_path=draw_exchanges(own[0][:SHOWN_EXCHANGES], blocks[0]),
            right_path=draw_exchanges(own[1][:SHOWN_EXCHANGES], blocks[1]),
            left_label=labels[0],
            right_label=labels[1],
            left_sums=added[0],
            right_sums=added[1],
            common_count=shared,
        )

    async def card(self, name: str, node: int) -> PlanCard:
        """The plan of the request that made a node."""
        row = await self.store.conversation(name)
        tree = await tree_of(self.store, row)
        response = tree.responses.get(node)
        if response is None:
            raise NotInStore(f"node {node} of this conversation was made by no request")
        turn = (await self.store.load(row, response.parent)).turn()
        line = (tree.responses.get(each.id) for each in path_to(tree, response.parent))
        records = (each.record for each in line if each)
        plan = plan_again(turn, response, [each for each in records if each])
        return card_of(plan, response, turn, await exchanges_at(self.store, node))

    def _model(self, tree: Tree) -> str:
        newest = max(tree.responses, default=0)
        return tree.responses[newest].model if newest else next(iter(self.models), "")


def path_to(tree: Tree, node: int) -> list[Node]:
    """The nodes from the root to this one."""
    nodes = {each.id: each for each in tree.nodes}
    path: list[Node] = []
    while node in nodes:
        path.append(nodes[node])
        node = nodes[node].parent
    return path[::-1]


def find_node(tree: Tree, at: str) -> int:
    """The node that is meant by a number or by the id of a response."""
    if at.isascii() and at.isdecimal() and len(at) < 19:
        if any(node.id == int(at) for node in tree.nodes):
            return int(at)
    else:
        for node, row in tree.responses.items():
            if row.provider_response_id == at:
                return node
    raise NotInStore(f"there is no response {at!r} in this conversation")


def status_of(row: ConversationRow, tree: Tree, now: float) -> str:
    """One word for how a conversation stands."""
    response = tree.responses.get(row.head)
    trouble = any(each.kind == "failed" and each.parent == row.head for each in tree.nodes)
    lost = response is not None and response.status == "lost"
    expires = response.expires_at if response and response.stored else None
    return status_word(row, expires, now, failed=trouble, lost=lost)


def status_word(
    row: ConversationRow, expires_at: float | None, now: float, *, failed: bool, lost: bool
) -> str:
    """Archived, failed, lost, expired, active or empty: the first that is true."""
    if row.archived:
        return "archived"
    if failed:
        return "failed"
    if lost:
        return "lost"
    return "expired" if is_expiring(expires_at, now) else "active"


def overview_status(each: Overview, now: float) -> str:
    """The same word, from sums alone."""
    lost = each.lost > 0 and each.expires_at is None
    return status_word(each.row, each.expires_at, now, failed=False, lost=lost)


def _first_words(tree: Tree) -> str:
    return next((words for words in tree.asked.values() if words), "")


def _label(chain: Chain, chosen: str) -> str:
    return next((node.label for node in chain.nodes if node.id == chosen), "")


def _branches(layout: Layout) -> tuple[Branch, ...]:
    return tuple(
        Branch(row.node.id, row.node.label, row.branch, "head" in row.node.marks)
        for row in layout.rows
        if row.branch is not None
    )


def _shared(left: Sequence[int], right: Sequence[int]) -> int:
    return next(
        (place for place, (a, b) in enumerate(zip(left, right, strict=False)) if a != b),
        min(len(left), len(right)),
    )
