"""Break statistics down by conversation, most requests first."""

from kedge.analytics.costs import query_costs, sum_by_group
from kedge.analytics.filters import build_condition
from kedge.analytics.queries import REQUEST_BYTES, TOKEN_COLUMNS, count_where, tokens_from_row
from kedge.analytics.results import ConversationStats, Cost, Selection
from kedge.prices import Prices
from kedge.store import Store
from kedge.store.database import Tx
from kedge.store.response_sums import ANSWERED

ALL_RESPONSES = Selection()


async def analyse_conversations(
    store: Store,
    selection: Selection = ALL_RESPONSES,
    *,
    limit: int = 20,
    prices: Prices | None = None,
) -> tuple[ConversationStats, ...]:
    """Compute statistics of the conversations with the most requests.

    Args:
        store: The store to read.
        selection: Which responses to include; all by default.
        limit: The maximum number of conversations.
        prices: Prices for responses that were stored without a cost; the current ones by default.

    Returns:
        The conversations, most requests first. They add up to what `analyse` returns, unless there are
        more than the limit.
    """
    return await store.database.read(
        lambda tx: _collect_conversations(tx, selection, limit, prices)
    )


def _collect_conversations(
    tx: Tx, selection: Selection, limit: int, prices: Prices | None
) -> tuple[ConversationStats, ...]:
    where = build_condition(tx, selection)
    rows = tx.rows(
        f"SELECT r.conversation, COUNT(*), {count_where(ANSWERED)}, COUNT(r.anchor), "  # noqa: S608
        f"{REQUEST_BYTES}, SUM(r.saved_bytes), {TOKEN_COLUMNS} FROM responses r WHERE {where.sql} "
        "GROUP BY r.conversation ORDER BY COUNT(*) DESC, r.conversation DESC LIMIT ?",
        (*where.values, limit),
    )
    if not rows:
        return ()
    marks = ", ".join("?" * len(rows))
    numbers = [row[0] for row in rows]
    names = {
        number: (name, title)
        for number, name, title in tx.rows(
            f"SELECT number, id, title FROM conversations WHERE number IN ({marks})",  # noqa: S608
            numbers,
        )
    }
    chosen = where.and_(f"r.conversation IN ({marks})", *numbers)
    spent = sum_by_group(query_costs(tx, chosen, prices, "r.conversation"))
    return tuple(
        ConversationStats(
            id=names[row[0]][0],
            title=names[row[0]][1],
            requests=int(row[1]),
            succeeded=int(row[2] or 0),
            chained=int(row[3]),
            sent_bytes=int(row[4] or 0),
            saved_bytes=int(row[5] or 0),
            tokens=tokens_from_row(row[6:]),
            cost=spent.get(row[0], Cost()),
        )
        for row in rows
    )
