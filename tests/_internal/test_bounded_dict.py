"""Test the dictionary of limited length."""

from kedge._internal.bounded_dict import BoundedDict


def test_the_entries_that_were_set_last_are_kept() -> None:
    """Setting an entry again makes it the newest one; the oldest are dropped beyond the maximum."""
    entries = BoundedDict[str, int](2)
    for number, key in enumerate("abac"):
        entries[key] = number
    assert list(entries.items()) == [("a", 2), ("c", 3)]
