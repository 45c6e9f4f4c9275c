"""An older state becomes the current one, step by step."""

from typing import Any

import pytest

from kedge.chat.state import FIRST_CHECKSUM_VERSION, UPGRADES, VERSION, upgrade_members
from kedge.turns import AssistantBlock, UserBlock, load_block


def make_version_1(*messages: Any, processed: int = 0) -> dict[str, Any]:
    """A state of version 1."""
    return {
        "version": 1,
        "provider": "openai",
        "processed_length": processed,
        "messages": list(messages),
    }


def test_there_is_a_step_from_every_older_version() -> None:
    """No version is left behind, and the checksum came no later than now."""
    assert sorted(UPGRADES) == list(range(1, VERSION))
    assert FIRST_CHECKSUM_VERSION <= VERSION


def test_messages_become_blocks() -> None:
    """What was said is kept, and nothing is claimed about a server's memory."""
    said = {"role": "user", "content": "Ada"}, {"role": "assistant", "content": "Hello"}
    made = upgrade_members(make_version_1(*said, processed=2))
    first, second = (load_block(each["as_is"]) for each in made.pop("blocks"))
    assert isinstance(first, UserBlock)
    assert isinstance(second, AssistantBlock)
    assert (first.text, second.text) == ("Ada", "Hello")
    assert made == {
        "version": VERSION,
        "provider": "openai",
        "processed_length": 2,
        "id": "",
        "responses": [],
        "anchors": [],
    }


@pytest.mark.parametrize(("processed", "left"), [(0, 0), (1, 0), (2, 0), (3, 1)])
def test_leading_system_messages_are_left_out_and_not_counted(processed: int, left: int) -> None:
    """They are no part of a state any more; later ones are."""
    rules, more = {"role": "system", "content": "Be kind"}, {"role": "developer", "content": "Now"}
    said = {"role": "user", "content": "Ada"}
    made = upgrade_members(make_version_1(rules, rules, said, more, processed=processed))
    assert len(made["blocks"]) == 2
    assert made["processed_length"] == left


@pytest.mark.parametrize("messages", [None, "hello", {}, [1], [{}], [{"content": "Ada"}]])
def test_what_are_no_messages_is_refused(messages: object) -> None:
    """A form that cannot be read is an error, which discards the state."""
    with pytest.raises(ValueError, match="messages are objects"):
        upgrade_members({**make_version_1(), "messages": messages})


def test_steps_follow_each_other_until_there_is_none() -> None:
    """Each takes a state one version further; the current one is left as it is."""

    def named(step: str) -> Any:
        return lambda members: {"seen": [*members.get("seen", ()), step]}

    steps = {1: named("one"), 2: named("two"), 4: named("never")}
    assert upgrade_members({"version": 1}, steps) == {"version": 3, "seen": ["one", "two"]}
    current = {"version": VERSION, "blocks": []}
    assert upgrade_members(current) is current
