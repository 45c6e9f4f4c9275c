"""The service layer of the page and the API: reading conversations and opening them for a run.

Every view is read in a few queries; requests to a model are in ``send``. Every request is answered by the service of
its caller, with the store and the runs of one user.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile
from typing import Any
from urllib.parse import quote, urlencode

from anyio import to_thread
from starlette.requests import HTTPConnection

from kedge.conversation import Conversation
from kedge.engines import Engine, Middleware
from kedge.errors import CannotConnect, KedgeError, NotInStore
from kedge.presentation.layout import compute_layout
from kedge.presentation.response_tree import (
    ResponseTree,
    Totals,
    build_response_tree,
    response_totals,
)
from kedge.server.access import CALLER_KEY
from kedge.store import AccessToken, ConversationRow, Hit, Node, RequestRecord, Store, summaries
from kedge.store import tree as trees
from kedge.store.nodes import parse_position
from kedge.turns import Block, SystemBlock
from kedge.web.block_diff import block_text, build_diff, describe_first_change, pair_edits
from kedge.web.deletions import DeletionQueue
from kedge.web.models import ModelSelector
from kedge.web.plan_card import PlanCard, mark_blocks
from kedge.web.runs import Run, RunRegistry
from kedge.web.schemas import FILE_TYPES, IMAGE_TYPES, ListQuery
from kedge.web.shapes import overview_status
from kedge.web.transcript import (
    ExchangeView,
    MessageView,
    MessageViews,
    find_pending,
    split_exchanges,
)
from kedge.workflows.roles import WORKFLOW_KEY

MAX_HITS = 2000
"""The maximum number of search results."""
MAX_EXCHANGES = 40
"""The number of exchanges of a path that are shown by default."""
WORKFLOW_TAG_PREFIX = f"{WORKFLOW_KEY}:"
WORKFLOW_KINDS = ("refine", "debate", "steps")
MAX_EDITS = 5
"""The number of edits of a path whose previous texts are shown."""
EDITED_KEY = "kedge.edited_from"
"""The metadata of an edited message: the id of the block that it replaced."""
MAX_UNANSWERED = 3
"""The number of questions without an answer that are shown at a node."""


@dataclass(frozen=True, slots=True)
class OpenConversation:
    """A conversation with its tree, the position to continue from, and the model that answers there."""

    conversation: Conversation
    tree: trees.StoredTree
    node: int
    options: Mapping[str, Any]
    """The options of every request."""


@dataclass(frozen=True, slots=True)
class ConversationService:
    """The operations of the page and the API on a store and its models."""

    store: Store
    models: ModelSelector
    settings: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Settings of every Conversation: tools, middleware, price…"""
    clock: Callable[[], float] = time.time
    runs: RunRegistry = field(default_factory=RunRegistry)
    deletions: DeletionQueue = field(default_factory=DeletionQueue)

    async def find(
        self, query: ListQuery
    ) -> tuple[list[summaries.ConversationSummary], int, dict[str, list[Hit]]]:
        """Return a page of conversations, without conversations that are about to be deleted.

        Returns:
            The conversations, their total number, and the hits of a search by id.
        """
        only: list[str] | None = None
        hits: dict[str, list[Hit]] = {}
        if query.q.strip():
            for hit in await self.store.search(query.q, tag=query.tag, limit=MAX_HITS):
                hits.setdefault(hit.conversation, []).append(hit)
            by_title = await summaries.find_by_title(self.store, query.q.strip(), MAX_HITS)
            only = list(dict.fromkeys([*by_title, *hits]))
        rows, total = await summaries.list_summaries(
            self.store, ids=only, started=True, **query.model_dump(exclude={"q"})
        )
        return rows, total, hits

    def status(self, summary: summaries.ConversationSummary) -> str:
        """Return the status of a conversation in a list."""
        if self.runs.list(summary.row.id):
            return "running"
        return overview_status(summary, self.clock())

    async def open(
        self, name: str, at: str = "", model: str = "", middleware: Sequence[Middleware] = ()
    ) -> OpenConversation:
        """Open a conversation with the model that answers at a position.

        Args:
            name: The id of the conversation.
            at: A node or the id of a response; the head by default.
            model: A model of the server to use instead of the conversation's own.
            middleware: Middleware around that of the settings.

        Raises:
            NotInStore: If there is no such conversation or position, or it is about to be deleted.
            CannotConnect: If the conversation's model is not available here; nothing was written.
        """
        row, tree = await self._read_tree(name)
        node = (await self.store.find_node(row, parse_position(at))).id
        choice = self.models.select(row, await self.store.newest_response(row, node), model)
        settings = dict(self.settings)
        settings["middleware"] = (*middleware, *settings.get("middleware", ()))
        opened = await Conversation.open(choice.engine, store=self.store, id=row.id, **settings)
        options: dict[str, Any] = {}
        if choice.request_name:
            options["model"] = choice.request_name
        return OpenConversation(opened, tree, node, options)

    async def load_view(
        self,
        name: str,
        at: str = "",
        unfold: frozenset[int] = frozenset(),
        *,
        show_all: bool = False,
        block: str = "",
    ) -> dict[str, Any]:
        """Load a conversation with its graph and the path to the selected response, for the template.

        Args:
            name: The id of the conversation.
            at: A node or the id of a response; the head by default.
            unfold: Responses whose run is not folded in the graph.
            show_all: Whether to show all exchanges of the path.
            block: A block to show: the head is selected if its path contains the block, else the newest
                node below ``at``.
        """
        row, tree = await self._read_tree(name)
        response_tree = build_response_tree(tree, self.clock())
        node = (await self.store.find_node(row, parse_position(at))).id
        if block:
            node = await self._find_view_of(row, tree, node, block)
        chosen = response_tree.shown_nodes.get(node, 0)

        loaded = await self.store.load(row, node)
        path = trees.path_to(tree, node)
        previous_texts = await self._load_previous_texts(row, path, loaded.blocks)
        models = trees.name_answer_models(tree, path, loaded.blocks)
        messages = MessageViews(loaded.blocks, previous_texts, models)
        exchanges, ranges = split_exchanges(path, messages, tree.responses)
        omitted = max(len(exchanges) - MAX_EXCHANGES, 0)
        if show_all:
            omitted = 0

        runs = self.runs.list(row.id)
        run, other_run = _find_shown_run(runs, response_tree, chosen)
        unanswered = await self._load_unanswered(row, tree, node, runs)
        pending = find_pending(path, ranges, messages)
        rest: tuple[MessageView, ...] = ()
        if pending is None:
            rest = messages.render_ranges(ranges)
        else:
            unanswered.insert(0, pending)

        summary = await self.summarize(row)
        model, problem = self._describe_model(row, await self.store.newest_response(row, node))
        available = self.models.names
        if not problem:
            available = (model, *available)
        return {
            "row": row,
            "name": _name_conversation(summary),
            "model": model,
            "models": dict.fromkeys(available),
            "model_problem": problem,
            "status": self.status(summary),
            "layout": compute_layout(response_tree.nodes, chosen, unfold),
            "answer_models": trees.name_models(tree.responses),
            "node": node,
            "chosen": chosen,  # the shown node that represents the selected one; 0 if there is none
            "chosen_label": _node_label(response_tree, chosen),
            "head": response_tree.head,
            "path": exchanges[omitted:],
            "accepted": ",".join((*IMAGE_TYPES, *FILE_TYPES)),
            "system": read_instructions(loaded.blocks),
            "object_id": loaded.state.conversation_id,
            "pending": rest,
            "unanswered": unanswered,
            "times": {stored.id: stored.created_at for stored in tree.nodes},
            "sums": response_tree.sums,
            "omitted": omitted,
            "run": run,
            "other_run": other_run,
            "runs": [active.id for active in runs],
        }

    async def _read_tree(self, name: str) -> tuple[ConversationRow, trees.StoredTree]:
        row = await self.store.conversation(name)
        return row, await trees.read_tree(self.store, row)

    async def summarize(self, row: ConversationRow) -> summaries.ConversationSummary:
        """Return a conversation with its totals."""
        (summary,), _ = await summaries.list_summaries(
            self.store, ids=[row.id], show="all", scheduled=True
        )
        return summary

    async def _find_view_of(
        self, row: ConversationRow, tree: trees.StoredTree, node: int, block: str
    ) -> int:
        """Return a node whose path contains a block."""
        blocks = (await self.store.load(row)).blocks
        if any(candidate.id == block for candidate in blocks):
            return row.head
        below = {node}
        for child in tree.nodes:  # parents come before their children
            if child.parent in below and child.kept >= min(child.length, 1):
                below.add(child.id)
        return max(below)

    async def _load_unanswered(
        self, row: ConversationRow, tree: trees.StoredTree, node: int, runs: Sequence[Run]
    ) -> list[ExchangeView]:
        """Load the questions below a node that have no complete answer and are not running."""
        exchanges: list[ExchangeView] = []
        for unanswered in (await self.store.unanswered_after(row, node))[-MAX_UNANSWERED:]:
            question = unanswered.question.id
            if question == node or any(run.has_asked(question) for run in runs):
                continue
            path = trees.path_to(tree, unanswered.end.id)
            blocks = (await self.store.load(row, unanswered.end.id)).blocks
            models = trees.name_answer_models(tree, path, blocks)
            messages = MessageViews(blocks, models=models)
            on_path, ranges = split_exchanges(path, messages, tree.responses)
            exchanges += [exchange for exchange in on_path if exchange.question == question]
            pending = find_pending(path, ranges, messages)
            if pending is not None:
                exchanges.append(pending)
            elif not exchanges[-1].is_trouble:  # its last answer has a tool call without a result
                exchanges[-1] = replace(exchanges[-1], status=unanswered.status, has_progress=True)
        return exchanges

    async def compare(self, name: str, left: str, right: str) -> dict[str, Any]:
        """Compare the paths to two nodes block by block, for the template."""
        row, tree = await self._read_tree(name)
        left_end = (await self.store.find_node(row, parse_position(left))).id
        right_end = (await self.store.find_node(row, parse_position(right))).id
        left_blocks = (await self.store.load(row, left_end)).blocks
        right_blocks = (await self.store.load(row, right_end)).blocks
        models = {
            **trees.name_answer_models(tree, trees.path_to(tree, left_end), left_blocks),
            **trees.name_answer_models(tree, trees.path_to(tree, right_end), right_blocks),
        }
        rows, common = await to_thread.run_sync(build_diff, left_blocks, right_blocks, models)
        response_tree = build_response_tree(tree, self.clock())
        return {
            "id": row.id,
            "name": _name_conversation(await self.summarize(row)),
            "left": str(left_end),
            "right": str(right_end),
            "rows": rows,
            "sides": [
                _describe_side("left", left_end, right_end, tree, response_tree),
                _describe_side("right", right_end, left_end, tree, response_tree),
            ],
            "common_count": common,  # the number of blocks that are the same
        }

    async def _load_previous_texts(
        self, row: ConversationRow, path: Sequence[Node], blocks: Sequence[Block]
    ) -> dict[str, str]:
        """Return the text of each edited block before its last edit, by block id."""
        texts: dict[str, str] = {}
        for block in blocks:
            replaced_id = block.metadata.get(EDITED_KEY)
            if not isinstance(replaced_id, str):
                continue
            replaced = await summaries.load_attached(self.store, row, replaced_id)
            texts[block.id] = block_text(replaced[-1]) if replaced else ""
        parents = {node.id: node for node in path}
        edits = [node for node in path if node.kind == "edited" and node.parent in parents]
        for node in edits[-MAX_EDITS:]:
            before = (await self.store.load(row, node.parent)).blocks
            after = (await self.store.load(row, node.id)).blocks
            texts |= pair_edits(before, after)
        return texts

    async def load_plan_card(self, name: str, node: int) -> PlanCard:
        """Load the plan of the request that created a node."""
        row, tree = await self._read_tree(name)
        response = tree.responses.get(node)
        if response is None:
            raise NotInStore(f"node {node} of this conversation was not created by a request")
        turn = (await self.store.load(row, response.parent)).turn()
        changed = await self._describe_change(row, tree, response, turn.blocks)
        exchanges = await summaries.load_exchanges(self.store, node)
        return PlanCard(response, mark_blocks(turn.body, response), exchanges, changed)

    async def _describe_change(
        self,
        row: ConversationRow,
        tree: trees.StoredTree,
        response: RequestRecord,
        blocks: Sequence[Block],
    ) -> str:
        """Return a sentence about the change that made a newer response unusable as an anchor."""
        nodes = {record.provider_response_id: node for node, record in tree.responses.items()}
        for rejected in response.rejected:
            node = nodes.get(rejected.response_id)
            if rejected.reason == "changed" and node is not None:
                before = (await self.store.load(row, node)).blocks
                return describe_first_change(before, blocks)
        return ""

    def _describe_model(
        self, row: ConversationRow, response: RequestRecord | None
    ) -> tuple[str, str]:
        """Return the name of the model that answers, and the reason if it is not available."""
        try:
            return self.models.select(row, response).name, ""
        except KedgeError as error:
            return self.models.recorded_name(row, response), str(error)


def build_tag_url(name: str) -> str:
    """Return the link of a tag: to its workflow, or to the conversations that have it."""
    workflow = name.removeprefix(WORKFLOW_TAG_PREFIX)
    if workflow != name and workflow not in WORKFLOW_KINDS:
        return f"/workflows/{quote(workflow, safe='')}"
    return f"/?{urlencode({'tag': name})}"


def read_instructions(blocks: Sequence[Block]) -> str:
    """Return the leading system text of a path."""
    leading = takewhile(lambda block: isinstance(block, SystemBlock), blocks)
    return "\n\n".join(block.text for block in leading if isinstance(block, SystemBlock))


def _name_conversation(summary: summaries.ConversationSummary) -> str:
    """Return the title of a conversation, or the beginning of its first message."""
    return summary.row.title or summary.first_words or "New conversation"


def _node_label(response_tree: ResponseTree, chosen: int) -> str:
    return next((node.label for node in response_tree.nodes if node.id == chosen), "")


def _own_totals(tree: trees.StoredTree, end: int, other: int) -> Totals:
    """Return the totals of the responses that are on one path and not on the other."""
    shared = {node.id for node in trees.path_to(tree, other)}
    totals = Totals()
    for node in trees.path_to(tree, end):
        response = tree.responses.get(node.id)
        if response is not None and node.id not in shared:
            totals += response_totals(response)
    return totals


def _describe_side(
    name: str, end: int, other: int, tree: trees.StoredTree, response_tree: ResponseTree
) -> tuple[str, int, Totals, str]:
    """Return the name of a side of a comparison, its end, its own totals and its label."""
    label = _node_label(response_tree, response_tree.shown_nodes.get(end, end))
    return name, end, _own_totals(tree, end, other), label


def _find_shown_run(
    runs: Sequence[Run], response_tree: ResponseTree, chosen: int
) -> tuple[Run | None, Run | None]:
    """Return the run that continues the chosen response; if there is none, the first one elsewhere."""
    for run in runs:
        if response_tree.shown_nodes.get(run.at, 0) == chosen:
            return run, None
    return None, next(iter(runs), None)


class UserServices:
    """The services of all users.

    Args:
        service: The service of the administrator.
        connect: Returns an engine that calls the server of this process for a caller.
    """

    def __init__(
        self,
        service: ConversationService,
        connect: Callable[[AccessToken], Engine] | None = None,
    ) -> None:
        self._connect = connect
        self._services = {"": service}
        self._models: dict[AccessToken, ModelSelector] = {}

    def get(self, caller: AccessToken | None) -> ConversationService:
        """Return the service of a caller, which is None for the administrator."""
        admin = self._services[""]
        if caller is None or self._connect is None:
            return admin
        service = self._services.get(caller.namespace)
        if service is None:
            store = admin.store.use_namespace(caller.namespace)
            service = replace(admin, store=store, runs=RunRegistry())
            self._services[caller.namespace] = service
        if caller not in self._models:
            connect_provider = _reject_provider if caller.namespace else None
            engine = self._connect(caller)
            self._models[caller] = admin.models.with_engine(engine, connect_provider)
        return replace(service, models=self._models[caller])

    async def aclose(self) -> None:
        """Stop all runs and the scheduled deletions, and close the connections."""
        for service in list(self._services.values()):
            await service.runs.stop_all()
        await self._services[""].deletions.aclose()
        for models in list(self._models.values()):
            await models.aclose()
            await models.engine.aclose()


def get_service(request: HTTPConnection) -> ConversationService:
    """Return the service of the user who sent a request."""
    services: UserServices = request.app.state.services
    return services.get(request.scope.get(CALLER_KEY))


def _reject_provider(name: str) -> Engine:
    """Reject a provider that would use this machine's keys, which belong to the administrator."""
    raise CannotConnect(f"{name} is not available to users; choose a model of this server")
