"""Functions that create conversations in a store for tests."""

from pathlib import Path
from typing import Any

from kedge import assistant, user
from kedge.planning import plan_request, record_response
from kedge.planning.anchors import get_state
from kedge.store import ConversationRow, Node, RequestRecord, Store
from kedge.turns import Turn

SCOPE = "openai/api.openai.com/v1/0123456789abcdef"


def make_response_row(turn: Turn, response_id: str) -> RequestRecord:
    """Return the row of the response with which this Turn ends, with its actual digest."""
    record = get_state(turn).anchor(response_id)
    assert record
    return RequestRecord(
        provider="openai", scope=SCOPE, provider_response_id=response_id, model="gpt", mode="chained",
        digest=record.digest, block_count=record.block_count, depth=record.depth,
        root_created_at=record.root_created_at, created_at=record.created_at, expires_at=record.expires_at,
        derived=record.derived,
    )  # fmt: skip


async def create_conversation(
    store: Store, exchanges: int = 3, *, title: str = "A talk", **settings: Any
) -> tuple[ConversationRow, list[Node]]:
    """Create a conversation with actual digests, and return its final row and its nodes."""
    row = await store.create(title, **settings)
    nodes = [(await store.load(row)).node]
    turn = Turn()
    for number in range(exchanges):
        turn, node = await append_exchange(store, row, nodes[-1], turn, f"{title} {number}")
        nodes.append(node)
    return await store.conversation(row.id), nodes


async def append_exchange(
    store: Store, row: ConversationRow, node: Node, turn: Turn, text: str
) -> tuple[Turn, Node]:
    """Append a question and its answer."""
    next_turn = turn.append(user(f"question {text}"))
    plan = plan_request(next_turn, scope=SCOPE, now=1.0)
    name = f"resp_{text.replace(' ', '_')}"
    answer = [assistant(f"answer {text}")]
    turn = record_response(next_turn, answer, response_id=name, plan=plan, created_at=1.0)
    added = turn.blocks[len(next_turn.blocks) - 1 :]
    appended = await store.append(
        row, node, added, response=make_response_row(turn, name), head=node.id
    )
    return turn, appended


def read_files(folder: Path) -> bytes:
    """Return the bytes of all files in a folder."""
    return b"".join(path.read_bytes() for path in folder.iterdir())


async def count_rows(store: Store, *tables: str) -> list[int]:
    """Return the number of rows of each table."""

    def work(tx: Any) -> list[int]:
        return [tx.rows(f"SELECT COUNT(*) FROM {table}")[0][0] for table in tables]  # noqa: S608

    return await store.database.read(work)
