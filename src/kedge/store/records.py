"""The rows of a store as frozen values: conversations, nodes, responses, telemetry."""

from collections.abc import Iterable, Mapping
from typing import Any, Literal, TypeGuard

import msgspec

from kedge._internal.arguments import check_count, check_type, describe_value, validate_seconds
from kedge.errors import InvalidSetting, describe_type
from kedge.events.request_record import ResponseStatus
from kedge.planning import Mode, set_state
from kedge.planning.anchors import WAITING_STATUSES, ConversationState, validate_mode
from kedge.turns import Block, Turn, new_id
from kedge.turns.frozen_json import EMPTY, FrozenMap, check_text, freeze_map


def validate_text(text: str, field: str) -> str:
    """Return the text; raise if it has a NUL, which PostgreSQL cannot store, or lone surrogates."""
    check_type(field, str, text)
    if "\0" in check_text(text, field):
        raise InvalidSetting(f"{field} contains a NUL character; remove it")
    return text


def validate_title(title: str) -> str:
    """Return a title that every database can store; one of only spaces is none."""
    text = validate_text(title, "title")
    if not text.strip():
        return ""
    return text


MAX_NAME_LENGTH = 400
"""The maximum length of an id, a tag or a key. PostgreSQL limits what an index can contain."""


def validate_name(text: str, field: str) -> str:
    """Return a text of an index; raise if no database can store it, or if it is too long for some."""
    if len(validate_text(text, field)) > MAX_NAME_LENGTH:
        raise InvalidSetting(f"{field} must have at most {MAX_NAME_LENGTH} characters")
    return text


def is_row_number(value: object) -> TypeGuard[int]:
    """Return whether a value can be the number of a row."""
    return type(value) is int and 0 < value <= MAX_INTEGER


MAX_INTEGER = (1 << 63) - 1
"""The largest integer that every database can store."""
MAX_NAMESPACE_LENGTH = 200


def validate_namespace(name: str) -> str:
    """Return the name of a namespace; raise unless it is printable text without spaces at its ends."""
    if not validate_text(name, "namespace") or not name.isprintable() or name != name.strip():
        raise InvalidSetting("namespace must be printable text without spaces at its ends")
    if len(name) > MAX_NAMESPACE_LENGTH:
        raise InvalidSetting(f"namespace must have at most {MAX_NAMESPACE_LENGTH} characters")
    return name


def require_default_namespace(namespace: str, operation: str) -> None:
    """Raise `InvalidSetting` for an operation on all namespaces, if the store is bound to one."""
    if namespace:
        raise InvalidSetting(
            f"{operation} is not allowed in the namespace {namespace!r}; "
            "use the store without a namespace"
        )


def validate_page(limit: int, offset: int = 0) -> None:
    """Check the maximum number of rows to return, and how many to skip.

    SQLite would return all rows for a negative limit; both databases reject numbers above 64 bits.
    """
    for name, number in (("limit", limit), ("offset", offset)):
        if check_count(name, number) >= MAX_ROWS:
            raise InvalidSetting(f"{name} must be less than 2^62, not {describe_value(number)}")


MAX_ROWS = 2**62


def validate_tags(texts: Iterable[str]) -> tuple[str, ...]:
    """Return the distinct tags; none may be empty."""
    if isinstance(texts, str):
        raise InvalidSetting("tags must be a list of texts, not one text")
    if not isinstance(texts, Iterable):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise InvalidSetting(f"tags must be a list of texts, not {describe_type(texts)}")
    tags = tuple(dict.fromkeys(validate_name(text, "tag") for text in texts))
    if "" in tags:
        raise InvalidSetting("a tag is empty; remove it")
    return tags


NodeKind = Literal[
    "root", "asked", "answered", "results", "failed", "added", "edited", "compacted", "merged"
]
"""The kind of a node: the root; a question, stored before it is sent; an answer; tool results, stored before
they are sent; a failed request, or without a request tools that were stopped; blocks added without a request;
an edit; a compaction; a summary of another branch."""

ANSWERED_STATUSES: tuple[ResponseStatus, ...] = ("completed", "lost")
"""The statuses of answered requests; a response that the provider lost later was answered."""
NOT_FAILED_STATUSES: tuple[ResponseStatus, ...] = (
    *ANSWERED_STATUSES,
    "cancelled",
    *WAITING_STATUSES,
)
"""The statuses of requests that did not fail: answered, stopped by the user, or not finished."""
_FAILED_CONDITIONS = (*(f"status <> '{each}'" for each in NOT_FAILED_STATUSES), "is_resent = 0")
FAILED_SQL = " AND ".join(_FAILED_CONDITIONS)
"""The condition of `has_failed`; it includes the condition of the index `responses_failed`, as written there."""


def has_failed(status: str, *, is_resent: bool) -> bool:
    """Return whether a request with this status failed for good: it was not sent again."""
    return not is_resent and status not in NOT_FAILED_STATUSES


class ConversationRow(msgspec.Struct, frozen=True):
    """A conversation: an id, and a head on a tree of nodes."""

    id: str
    title: str = ""
    tags: tuple[str, ...] = ()
    archived: bool = False
    head: int = 0
    mode: Mode | None = None
    retention: float | None = None
    """Seconds for which the provider is assumed to store a response, if less than its retention."""
    data: FrozenMap = EMPTY
    forked_from: str = ""
    forked_at: int = 0
    created_at: float = 0.0
    updated_at: float = 0.0
    tree: int = 0
    number: int = 0
    """The row number in this store, which is never used again; 0 if it is not stored. Use ``id`` everywhere else."""
    ttl: float | None = None
    """Seconds after its last change at which it expires; see `Store.delete_expired`."""
    delete_at: float | None = None
    """When it is deleted; until then it is not in lists, and `Store.schedule_delete` can undo that."""


def new_row(
    title: str = "",
    *,
    tags: Iterable[str] = (),
    mode: Mode | None = None,
    retention: float | None = None,
    ttl: float | None = None,
    data: Mapping[str, Any] = EMPTY,
    id: str = "",  # noqa: A002 - the name in the public contract
) -> ConversationRow:
    """Return the row of a conversation that is not stored yet; its number is 0.

    Raises:
        InvalidSetting: A value is not allowed.
    """
    return ConversationRow(
        validate_name(id, "id") or new_id("conv"),
        validate_title(title),
        validate_tags(tags),
        mode=validate_mode(mode),
        retention=validate_seconds(retention, "retention"),
        data=freeze_map(data, "data"),
        ttl=validate_seconds(ttl, "ttl"),
    )


class Node(msgspec.Struct, frozen=True):
    """A node of a tree: it retains the first ``kept`` blocks of its parent's path, and adds further blocks.

    ``length`` is the number of blocks on the path that ends here. Nodes of one ``branch`` only append
    to one another. ``conversation`` is the number of the conversation that added it.
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


class LoadedPath(msgspec.Struct, frozen=True):
    """The path to a node: its blocks, and the state with the anchors of its responses."""

    node: Node
    blocks: tuple[Block, ...]
    state: ConversationState
    data: FrozenMap = EMPTY

    def turn(self, turn_id: str = "") -> Turn:
        """Return the Turn that ends at this node, with the id ``turn_id`` or a new one."""
        return set_state(Turn(self.blocks, id=turn_id, data=self.data), self.state)


UnansweredStatus = Literal["pending", "cancelled", "failed"]


class UnansweredQuestion(msgspec.Struct, frozen=True):
    """A question without a complete answer: its request is in progress or failed, or a tool was interrupted."""

    question: Node
    end: Node
    """The newest node of its turn, such as a failed request."""
    status: UnansweredStatus
    """``cancelled`` if the user stopped the last request, or the tools after it."""


class Differences(msgspec.Struct, frozen=True):
    """The number of common blocks at the start of two paths, and the further blocks of each."""

    shared: int
    left: tuple[Block, ...]
    right: tuple[Block, ...]


class Claim(msgspec.Struct, frozen=True):
    """The claim on the message with an idempotency key.

    ``is_owner`` is whether the caller answers it; ``answer`` is the node of the answer, once there is
    one; ``question`` is the node of the question, if it is stored already. ``lease_until`` is a time of
    the database's clock.
    """

    key: str
    is_owner: bool
    question: int = 0
    answer: int = 0
    lease_until: float = 0.0


class Incident(msgspec.Struct, frozen=True):
    """A problem at a node: a healed or rejected request, lost context, or a changed mode."""

    kind: Literal["healed", "refused", "forgot", "mode_changed"]
    reason: str
    scope: str = ""
    created_at: float = 0.0
    node: int = 0
    conversation: str = ""


class ToolRow(msgspec.Struct, frozen=True):
    """One run of a tool."""

    name: str
    outcome: str
    seconds: float
    created_at: float = 0.0
    node: int = 0
    conversation: str = ""


class StoredExchange(msgspec.Struct, frozen=True):
    """The bodies of a request and its reply, truncated to the store's limit."""

    request: bytes
    reply: bytes
    status: int | None = None
    created_at: float = 0.0
    node: int = 0
    conversation: str = ""

    def __repr__(self) -> str:
        return f"StoredExchange(node={self.node}, status={self.status})"


class Telemetry(msgspec.Struct, frozen=True):
    """The incidents, tool runs and exchanges of a node, stored with it."""

    incidents: tuple[Incident, ...] = ()
    tools: tuple[ToolRow, ...] = ()
    exchanges: tuple[StoredExchange, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.incidents or self.tools or self.exchanges)


NO_TELEMETRY = Telemetry()


class Hit(msgspec.Struct, frozen=True):
    """A block that matches a search, as part of one conversation."""

    conversation: str
    node: int
    block_id: str
    kind: str
    excerpt: str
    created_at: float = 0.0
    """When the node was created."""
    score: float = 1.0
    """The score of the block, if the search was ordered by rank."""


class Damage(msgspec.Struct, frozen=True):
    """A damaged row, and its problem."""

    where: str
    problem: str

    def __str__(self) -> str:
        return f"{self.where}: {self.problem}"
