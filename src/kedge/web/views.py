"""What the page shows, as plain values: made from the store, drawn by the templates."""

from dataclasses import dataclass

from markupsafe import Markup

from kedge.store import ResponseRow
from kedge.web.chain_graph import Layout, Totals

EMPTY_MARKUP = Markup("")


@dataclass(frozen=True, slots=True)
class ConversationListItem:
    """One line of the list of conversations."""

    id: str
    name: str
    first_words: str
    last_answer: str
    turns: int
    forks: int
    tokens: int
    cached_share: str
    cost: float | None
    latency: float | None
    """The median of the seconds that answers took."""
    status: str
    expires_at: float | None
    updated_at: float
    tags: tuple[str, ...] = ()
    model: str = ""


@dataclass(frozen=True, slots=True)
class LinkChoice:
    """One of several links of which one is chosen: a filter, an order, a range."""

    name: str
    url: str
    chosen: bool


@dataclass(frozen=True, slots=True)
class ConversationList:
    """A page of the list of conversations."""

    rows: tuple[ConversationListItem, ...]
    total: int
    first: int
    query: str
    filters: tuple[LinkChoice, ...]
    orders: tuple[LinkChoice, ...]
    previous: str = ""
    next: str = ""

    @property
    def last(self) -> int:
        """The number of the last row."""
        return self.first + len(self.rows) - 1


@dataclass(frozen=True, slots=True)
class Attachment:
    """An image of a message: shown if its bytes are here, named and linked if they are elsewhere."""

    alt: str
    src: str = ""
    link: str = ""


@dataclass(frozen=True, slots=True)
class MessageView:
    """One block, as it is shown in a chat."""

    id: str
    kind: str
    title: str
    html: Markup = EMPTY_MARKUP
    text: str = ""
    hint: str = ""
    images: tuple[Attachment, ...] = ()
    tags: tuple[str, ...] = ()
    sent: bool = False


@dataclass(frozen=True, slots=True)
class BlockMark:
    """One block in the strip of a plan card, or a number of them folded together."""

    kind: str = ""
    words: str = ""
    sent: bool = False
    folded: int = 0

    @property
    def letter(self) -> str:
        """What stands for the kind of block."""
        return _KIND_LETTERS.get(self.kind, "?")


_KIND_LETTERS = {
    "user": "U",
    "assistant": "A",
    "reasoning": "R",
    "tool_call": "C",
    "tool_result": "T",
    "system": "S",
    "opaque": "O",
}


@dataclass(frozen=True, slots=True)
class RejectedCandidate:
    """A candidate that was not built on, and why."""

    response_id: str
    reason: str
    words: str


@dataclass(frozen=True, slots=True)
class RawExchange:
    """A request and its reply, as they went over the wire."""

    sent: str
    received: str
    status: int | None = None


@dataclass(frozen=True, slots=True)
class PlanCard:
    """What one request sent, on which anchor, and why not on a newer one."""

    row: ResponseRow
    headline: str
    blocks: tuple[BlockMark, ...] = ()
    refused: tuple[RejectedCandidate, ...] = ()
    notes: tuple[str, ...] = ()
    facts: tuple[tuple[str, str], ...] = ()
    raw: tuple[RawExchange, ...] = ()


@dataclass(frozen=True, slots=True)
class ExchangeView:
    """What one request brought: what was said before it, and what came back.

    ``node`` is where the answer is kept, ``before`` where the conversation stood before the question.
    """

    node: int
    before: int
    response_id: str
    asked: tuple[MessageView, ...]
    answered: tuple[MessageView, ...]
    row: ResponseRow
    status: str = "completed"
    error: str = ""
    created_at: float | None = None

    @property
    def is_trouble(self) -> bool:
        """Whether the request came to nothing."""
        return self.status not in ("completed", "lost")


@dataclass(frozen=True, slots=True)
class Branch:
    """One end of the tree, for choosing and comparing."""

    tip: str
    label: str
    sums: Totals
    is_head: bool = False


@dataclass(frozen=True, slots=True)
class ConversationView:
    """A conversation with its chain, and the path to the chosen response."""

    id: str
    name: str
    model: str
    models: tuple[str, ...]
    """The models to choose from; ``model`` is the one that answers."""
    model_problem: str
    """Why the conversation's own model is not available here; empty if it is."""
    status: str
    tags: tuple[str, ...]
    layout: Layout
    chosen: str
    chosen_label: str
    head: str
    path: tuple[ExchangeView, ...]
    pending: tuple[MessageView, ...]
    branches: tuple[Branch, ...]
    sums: Totals
    omitted: int = 0
    """Exchanges of the path that are older than what is shown."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two branches of one conversation, side by side from where they part."""

    id: str
    name: str
    left: str
    right: str
    common: tuple[ExchangeView, ...]
    left_path: tuple[ExchangeView, ...]
    right_path: tuple[ExchangeView, ...]
    left_label: str
    right_label: str
    left_sums: Totals
    right_sums: Totals
    common_count: int


@dataclass(frozen=True, slots=True)
class Tile:
    """One figure of the dashboard."""

    name: str
    value: str
    hint: str = ""


@dataclass(frozen=True, slots=True)
class Dashboard:
    """Figures and charts over a range of time."""

    tiles: tuple[Tile, ...]
    charts: tuple[Markup, ...]
    ranges: tuple[LinkChoice, ...]
    range: str
    seen: str
    """What had happened when this was drawn; see ``dashboard.beat``."""
    empty: bool = False


@dataclass(frozen=True, slots=True)
class Cell:
    """What one side said in one round of a workflow, and what was thought of it."""

    title: str
    html: Markup
    question: str = ""
    verdict: str = ""
    critique: str = ""
    good: bool | None = None


@dataclass(frozen=True, slots=True)
class RoundView:
    """One round: a cell for each side, and what the judge said of it."""

    title: str
    cells: tuple[Cell, ...]
    ruling: str = ""


@dataclass(frozen=True, slots=True)
class WorkflowView:
    """One run: a debate has a column for each side, a refinement or a pipeline has one cell a round."""

    id: str
    kind: str
    title: str
    question: str
    status: str
    rounds: tuple[RoundView, ...]
    verdict: str = ""
    good: bool | None = None
    chains: tuple[tuple[str, str], ...] = ()
    """The role and the conversation of each chain."""
