"""What is in a store, as plain frozen values: conversations, the nodes of their trees, responses."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from kedge.errors import InvalidSetting
from kedge.planning import AnchorRecord, Mode
from kedge.planning.state import MODES, ConversationState
from kedge.turns import Block, Turn
from kedge.turns.frozen_json import EMPTY, FrozenMap, check_text, freeze_map, thaw


def validate_text(text: str, field: str) -> str:
    """A text without NUL, which PostgreSQL cannot hold, and without half characters."""
    if "\0" in check_text(text, field):
        raise InvalidSetting(f"{field} holds a NUL character; leave it out")
    return text


def validate_mode(mode: Mode | None) -> Mode | None:
    """Check that a mode is one of those there are, or None."""
    if mode is not None and mode not in MODES:
        raise InvalidSetting(f"mode must be one of {', '.join(MODES)}, not {mode!r}")
    return mode


def validate_retention(seconds: object) -> float | None:
    """Check that a retention is a finite number of seconds above 0, or None."""
    if seconds is None:
        return None
    if isinstance(seconds, bool) or not isinstance(seconds, int | float):
        raise InvalidSetting(f"retention must be a number of seconds, not {seconds!r}")
    if not 0 < seconds < math.inf:
        raise InvalidSetting(f"retention must be a finite number of seconds above 0, not {seconds}")
    return float(seconds)


def validate_tags(texts: Iterable[str]) -> tuple[str, ...]:
    """Tags: several texts, none of them empty, each once."""
    if isinstance(texts, str):
        raise InvalidSetting("tags are several texts; write them as a list")
    tags = tuple(dict.fromkeys(validate_text(text, "tag") for text in texts))
    if "" in tags:
        raise InvalidSetting("a tag is empty; leave it out")
    return tags


def validate_data(data: Mapping[str, Any]) -> dict[str, Any]:
    """Data that JSON can say."""
    return thaw(freeze_map(data, "data"))


NodeKind = Literal[
    "root", "asked", "answered", "results", "failed", "added", "edited", "compacted", "merged"
]
"""What a node is: the beginning; a question, before it was sent; an answer; the results of tools,
before they were sent; an answer that never came; blocks added without asking; an edit; a compaction; a
summary of another branch."""

ResponseStatus = Literal["completed", "incomplete", "failed", "refused", "cut", "lost"]


@dataclass(frozen=True, slots=True)
class ConversationRow:
    """A conversation: a name, and a head on a tree of nodes."""

    id: str
    title: str = ""
    tags: tuple[str, ...] = ()
    archived: bool = False
    head: int = 0
    mode: Mode | None = None
    retention: float | None = None
    """Seconds for which the provider is relied on to keep a response, if that is less than it says."""
    data: Mapping[str, Any] = field(default_factory=dict[str, Any], hash=False)
    forked_from: str = ""
    forked_at: int = 0
    created_at: float = 0.0
    updated_at: float = 0.0
    tree: int = 0
    number: int = 0
    """The conversation's number inside its store; its ``id`` is its name everywhere."""


@dataclass(frozen=True, slots=True)
class Node:
    """One step of a tree: it keeps the first blocks of its parent's path, and adds its own.

    ``length`` is the number of blocks on the path that ends here. Nodes of one ``branch`` only append
    to one another. ``conversation`` is the number of the one that made it.
    """

    id: int
    tree: int
    branch: int
    parent: int
    conversation: int
    kind: NodeKind
    kept: int
    length: int
    depth: int
    memory: str | None = None
    created_at: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseRow:
    """One answer of a model, or one request that came to nothing, and what it took.

    ``node`` is the node that it made. ``anchor`` is the response that it was chained on; ``reason``
    is why it was chained on none. Tokens are ``None`` if the server did not count, ``cost`` if nobody
    knows the price. ``digest`` and what follows prove what the server remembers; see
    ``AnchorRecord``.
    """

    provider: str
    scope: str
    provider_response_id: str = ""
    model: str = ""
    mode: str = ""
    anchor: str = ""
    reason: str = ""
    healed: str = ""
    sent_blocks: int = 0
    sent_bytes: int = 0
    saved_blocks: int = 0
    saved_bytes: int = 0
    input_tokens: int | None = None
    cached_tokens: int | None = None
    output_tokens: int | None = None
    reasoning_tokens: int | None = None
    cost: float | None = None
    first_token_seconds: float | None = None
    seconds: float = 0.0
    status: ResponseStatus = "completed"
    error: str = ""
    created_at: float = 0.0
    expires_at: float | None = None
    stored: bool = True
    digest: str = ""
    block_count: int = 0
    depth: int = 0
    root_created_at: float = 0.0
    barrier: int | None = None
    derived: tuple[str, ...] = ()
    lost_reason: str = ""
    node: int = 0
    parent: int = 0
    conversation: str = ""

    @property
    def record(self) -> AnchorRecord | None:
        """The anchor that this response is; ``None`` if nothing is known of what it remembers."""
        if not self.digest:
            return None
        return AnchorRecord(
            self.provider_response_id,
            self.scope,
            self.digest,
            self.block_count,
            self.depth,
            self.root_created_at,
            "failed" if self.status in ("refused", "cut") else self.status,
            self.stored,
            self.created_at,
            self.expires_at,
            self.barrier,
            self.derived,
        )


@dataclass(frozen=True, slots=True)
class LoadedPath:
    """The path to a node: its blocks, and what is known about the server's memory of them."""

    node: Node
    blocks: tuple[Block, ...]
    state: ConversationState
    data: FrozenMap = EMPTY

    def turn(self, turn_id: str = "") -> Turn:
        """The Turn that ends here."""
        from kedge.planning import set_state

        return set_state(Turn(self.blocks, id=turn_id, data=self.data), self.state)


@dataclass(frozen=True, slots=True)
class Differences:
    """Where two branches part: how many blocks they share, and what each has after those."""

    shared: int
    left: tuple[Block, ...]
    right: tuple[Block, ...]


@dataclass(frozen=True, slots=True)
class Claim:
    """Who runs the turn with an idempotency key, and what came of it.

    ``mine`` says that the asker is to run it; ``answer`` is the node of the answer, once there is one;
    ``asked`` is the node of the question, if it was saved already.
    """

    key: str
    is_owner: bool
    question: int = 0
    answer: int = 0
    lease_until: float = 0.0


@dataclass(frozen=True, slots=True)
class Incident:
    """Something that went wrong, or nearly: a healing, a refusal, a forgetting."""

    kind: Literal["healed", "refused", "forgot", "mode_changed"]
    reason: str
    scope: str = ""
    created_at: float = 0.0
    node: int = 0
    conversation: str = ""


@dataclass(frozen=True, slots=True)
class ToolRow:
    """One run of a tool."""

    name: str
    outcome: str
    seconds: float
    created_at: float = 0.0
    node: int = 0
    conversation: str = ""


@dataclass(frozen=True, slots=True)
class StoredExchange:
    """A request and its reply, as they went over the wire; cut at the store's bound."""

    request: bytes = field(repr=False)
    reply: bytes = field(repr=False)
    status: int | None = None
    created_at: float = 0.0
    node: int = 0
    conversation: str = ""


@dataclass(frozen=True, slots=True)
class Telemetry:
    """What happened besides the answer itself; written with the node that it led to."""

    incidents: tuple[Incident, ...] = ()
    tools: tuple[ToolRow, ...] = ()
    exchanges: tuple[StoredExchange, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.incidents or self.tools or self.exchanges)


@dataclass(frozen=True, slots=True)
class Hit:
    """A block that matches a search, as part of one conversation."""

    conversation: str
    node: int
    block_id: str
    kind: str
    excerpt: str


@dataclass(frozen=True, slots=True)
class Damage:
    """One place where the store is not what it should be."""

    where: str
    problem: str

    def __str__(self) -> str:
        return f"{self.where}: {self.problem}"
