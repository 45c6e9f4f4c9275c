"""Large conversation trees that are created without a model."""

import random
import time
from typing import Any

from kedge.database.transactions import Tx
from kedge.store import ConversationRow, Node, RequestRecord, Store
from kedge.store.nodes import insert_node
from kedge.turns import assistant, user
from kedge.turns.json_codec import encode_block


async def create_large_tree(store: Store, responses: int, seed: int = 1) -> str:
    """Create a conversation with this many responses, a fifth of which start a branch; return its id."""
    row = await store.create("A tree of responses")
    root = await store.node(row, row.head)

    def work(tx: Tx) -> Node:
        rng = random.Random(seed)
        ends = [root]
        for number in range(responses):
            parent = ends[-1] if rng.random() < 0.8 else rng.choice(ends[-40:])
            ends.append(_insert_exchange(tx, parent, row, number))
        return ends[-1]

    await store.move_head(row, await store.database.write(work), head=row.head)
    return row.id


def _insert_exchange(tx: Tx, parent: Node, conversation: ConversationRow, number: int) -> Node:
    now = time.time()
    question = [encode_block(user(f"Question {number}"))]
    question_node, _ = insert_node(
        tx, parent, question, conversation=conversation, kind="asked", now=now
    )
    facts: dict[str, Any] = {
        "provider": "practice",
        "scope": "grown",
        "model": "practice",
        "mode": "chained",
    }
    counts: dict[str, Any] = {
        "sent_blocks": 1,
        "sent_bytes": 100,
        "input_tokens": 10,
        "output_tokens": 5,
    }
    varying: dict[str, Any] = {
        "saved_bytes": 50 * number,
        "provider_response_id": f"resp_{number:08}",
    }
    response = RequestRecord(**facts, **counts, **varying, created_at=now)
    answer = [encode_block(assistant(f"Answer {number}"))]
    made: Any = {"conversation": conversation, "kind": "answered", "now": now, "response": response}
    node, _ = insert_node(tx, question_node, answer, **made)
    return node
