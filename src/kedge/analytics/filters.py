"""Convert a selection into an SQL condition with its values."""

from dataclasses import dataclass
from typing import Any

from kedge.analytics.results import Selection
from kedge.store.database import Tx
from kedge.store.tree import NOT_FALLBACK_REASONS

FALLBACK = (
    "r.anchor IS NULL AND r.reason IS NOT NULL "
    f"AND r.reason NOT IN ({', '.join(repr(each) for each in NOT_FALLBACK_REASONS)})"
)

OWN_NUMBERS = "(SELECT number FROM conversations WHERE namespace = ?)"
"""The numbers of the conversations of a namespace."""


@dataclass(frozen=True, slots=True)
class SqlCondition:
    """A condition on responses ``r``, and the values of its placeholders."""

    sql: str
    values: tuple[Any, ...] = ()

    def and_(self, sql: str, *values: Any) -> "SqlCondition":
        """Return a condition that requires both."""
        return SqlCondition(f"{self.sql} AND {sql}", (*self.values, *values))


def build_condition(tx: Tx, selection: Selection) -> SqlCondition:
    """Return the condition for the responses of a selection, in the namespace of a transaction."""
    condition = SqlCondition(f"r.conversation IN {OWN_NUMBERS}", (tx.namespace,))
    if selection.since is not None:
        condition = condition.and_("r.created_at >= ?", selection.since)
    if selection.until is not None:
        condition = condition.and_("r.created_at < ?", selection.until)
    if selection.model:
        condition = condition.and_("r.model = ?", selection.model)
    if selection.provider:
        condition = condition.and_("r.provider = ?", selection.provider)
    if selection.conversation:
        number = "(SELECT number FROM conversations WHERE id = ? AND namespace = ?)"
        values = (selection.conversation, tx.namespace)
        condition = condition.and_(f"r.conversation = {number}", *values)
        condition = condition.and_(
            "r.node IN (SELECT n.id FROM nodes n JOIN conversations c ON c.tree = n.tree "
            "WHERE c.id = ? AND c.namespace = ?)",
            *values,
        )
    return condition


def build_time_condition(selection: Selection, column: str) -> SqlCondition:
    """Return the condition that a time is in the range of a selection."""
    condition = SqlCondition("1 = 1")
    if selection.since is not None:
        condition = condition.and_(f"{column} >= ?", selection.since)
    if selection.until is not None:
        condition = condition.and_(f"{column} < ?", selection.until)
    return condition


def has_response_filter(selection: Selection) -> bool:
    """Return whether a selection restricts more than the time."""
    return bool(selection.model or selection.provider or selection.conversation)
