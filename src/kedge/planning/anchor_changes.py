"""Changes of the anchor records of a Turn by others than its engine, such as a middleware.

A store has the records of the responses on a path. A Turn may have others: a middleware has dropped one or marked it as
lost, or the conversation began with the Turn of another program. Such a change is stored with its node.
"""

from collections.abc import Iterable, Sequence
from operator import is_

import msgspec
from msgspec.structs import replace

from kedge.planning.anchors import AnchorRecord, get_state, select_matching
from kedge.turns import Turn

AnchorKey = tuple[str, str]
"""The response and the scope of a record."""


class AnchorChanges(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """The difference between the records of a Turn and the known records of its path; false if there is none.

    Attributes:
        dropped: The records that the Turn does not have.
        lost: The records that it marks as lost.
        added: The records that only the Turn has, or whose other members differ.
    """

    dropped: tuple[AnchorKey, ...] = ()
    lost: tuple[AnchorKey, ...] = ()
    added: tuple[AnchorRecord, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.dropped or self.lost or self.added)

    def apply(self, records: dict[AnchorKey, AnchorRecord]) -> None:
        """Change the known records to the records of the Turn."""
        for key in self.dropped:
            records.pop(key, None)
        for key in self.lost:
            if key in records:
                records[key] = replace(records[key], status="lost")
        for record in self.added:
            records[get_key(record)] = record


NO_CHANGES = AnchorChanges()


def get_key(record: AnchorRecord) -> AnchorKey:
    """Return what identifies a record in a Turn."""
    return record.response_id, record.scope


def compare_anchors(known: Sequence[AnchorRecord], turn: Turn) -> AnchorChanges:
    """Return how the records of a Turn differ from the known records of its path.

    Engines and compactors remove records that do not match the Turn. They prove nothing, and are not a change.
    """
    present = get_state(turn).anchors
    if len(known) == len(present) and all(map(is_, known, present)):
        return NO_CHANGES  # the usual case
    before = {get_key(record): record for record in known}
    after = {get_key(record): record for record in present}
    missing = [record for key, record in before.items() if key not in after]
    usable = [record for record in missing if record.status == "completed"]
    if not select_matching(turn, usable):
        missing = []
    changed = [key for key, record in after.items() if not _is_same(record, before.get(key))]
    lost = [key for key in changed if _is_marked_lost(after[key], before.get(key))]
    added = (after[key] for key in changed if key not in lost)
    return AnchorChanges(tuple(map(get_key, missing)), tuple(lost), tuple(added))


def apply_changes(
    records: Iterable[tuple[int, AnchorRecord]], changes: Iterable[tuple[int, AnchorChanges]]
) -> tuple[AnchorRecord, ...]:
    """Return the records at the end of a path.

    Args:
        records: The records of the responses on the path, each with its node.
        changes: The changes on the path, each with its node, after whose response it applies.
    """
    path_records: dict[AnchorKey, AnchorRecord] = {}
    remaining = sorted(records, key=_get_node, reverse=True)
    for node, change in sorted(changes, key=_get_node):
        while remaining and remaining[-1][0] <= node:
            record = remaining.pop()[1]
            path_records[get_key(record)] = record
        change.apply(path_records)
    for _, record in reversed(remaining):
        path_records[get_key(record)] = record
    return tuple(path_records.values())


def _get_node(pair: tuple[int, object]) -> int:
    return pair[0]


def _is_same(record: AnchorRecord, known: AnchorRecord | None) -> bool:
    """Return whether two records are equal; the stored request of a running response is no part of a path."""
    if record is known:
        return True
    return known is not None and replace(record, request="") == replace(known, request="")


def _is_marked_lost(record: AnchorRecord, known: AnchorRecord | None) -> bool:
    """Return whether a record differs only by being lost."""
    if known is None or record.status != "lost":
        return False
    return _is_same(record, replace(known, status="lost"))
