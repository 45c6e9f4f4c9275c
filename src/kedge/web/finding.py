"""Finding conversations: by words that were said, by how they stand, a page at a time."""

from kedge.store import Store
from kedge.store.overview import Overview, overview, titled
from kedge.web.models import ListQuery

MOST_HITS = 2000
"""How many places a search may find."""


async def find_conversations(store: Store, asked: ListQuery) -> tuple[list[Overview], int]:
    """A page of conversations, and how many there are in all."""
    only = None
    if asked.q.strip():
        hits = await store.search(asked.q, limit=MOST_HITS)
        named = await titled(store, asked.q.strip(), MOST_HITS)
        only = list(dict.fromkeys([*named, *(hit.conversation for hit in hits)]))
    return await overview(
        store,
        shown=asked.show,
        order=asked.order,
        only=only,
        tag=asked.tag,
        limit=asked.limit,
        offset=asked.offset,
    )
