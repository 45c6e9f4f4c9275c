"""Fixtures for stores, and a class that adds responses to them."""

from typing import Any

from kedge.store import ConversationRow, RequestRecord, Store
from kedge.turns import user


class ResponseWriter:
    """A writer that adds responses to a conversation."""

    def __init__(self, store: Store, row: ConversationRow) -> None:
        self.store = store
        self.row = row
        self.count = 0

    async def add_response(self, *, after: int | None = None, **members: Any) -> int:
        """Add a response after the head or after a node, and return its node."""
        self.count += 1
        at = (await self.store.conversation(self.row.id)).head if after is None else after
        parent = await self.store.node(self.row, at)
        question = await self.store.append(self.row, parent, [user(f"{self.count}")], kind="asked")
        status = members.get("status", "completed")
        answered = status in ("completed", "lost")
        options = {
            "provider": "openai", "scope": "openai", "model": "gpt-5.1", "mode": "chained",
            "provider_response_id": f"resp_{self.row.id}_{self.count}" if answered else "",
            "depth": 1 if answered else 0, "reason": "" if members.get("anchor") else "new",
            **members,
        }  # fmt: skip
        node = await self.store.append(
            self.row,
            question,
            [user("…")] if answered else [],
            kind="answered" if answered else "failed",
            response=RequestRecord(**options),
            head=at if answered and after is None else None,
        )
        return node.id
