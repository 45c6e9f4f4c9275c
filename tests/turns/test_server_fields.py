"""Which fields of a provider's item are content."""

from typing import Any

import msgspec
from hypothesis import given

from kedge.turns import FrozenMap, OpaqueBlock
from kedge.turns.frozen_json import thaw
from kedge.turns.responses_items import item_from_block
from kedge.turns.server_fields import (
    ID_IS_CONTENT,
    STATUS_IS_CONTENT,
    drop_nulls,
    strip_server_fields,
)
from strategies import json_values, opaque_items


def has_null_member(value: Any) -> bool:
    if isinstance(value, dict):
        return any(member is None or has_null_member(member) for member in value.values())
    return isinstance(value, list) and any(map(has_null_member, value))


@given(json_values())
def test_null_members_are_dropped(value: Any) -> None:
    """Null members are removed at any depth, and nulls in lists remain."""
    cleaned = thaw(drop_nulls(FrozenMap(a=value)))
    assert not has_null_member(cleaned)
    if not has_null_member({"a": value}):
        assert FrozenMap(cleaned) == FrozenMap(a=value)
    assert thaw(drop_nulls(FrozenMap(a=[None, 1, None]))) == {"a": [None, 1, None]}


@given(opaque_items())
def test_id_and_status_are_stripped_unless_content(item: Any) -> None:
    """The id and status are removed except for the listed types, and all other members remain."""
    retained = strip_server_fields(FrozenMap(item))
    visible = {"type", *(k for k, v in item.items() if v is not None)}
    hidden = {
        *([] if item["type"] in ID_IS_CONTENT else ["id"]),
        *([] if item["type"] in STATUS_IS_CONTENT else ["status"]),
    }
    assert retained.keys() == visible - hidden
    assert strip_server_fields(retained) == retained


def test_image_id_is_content_without_a_result() -> None:
    """The id of a generated image without a result is content, because a client edits the image by id."""
    first, second = (
        FrozenMap({"type": "image_generation_call", "id": name, "status": "completed"})
        for name in ("ig_1", "ig_2")
    )
    assert strip_server_fields(first) != strip_server_fields(second)
    assert item_from_block(OpaqueBlock(first))["id"] == "ig_1"
    complete = FrozenMap({**first, "result": "aGk="})
    assert "id" not in strip_server_fields(complete)


class JsonValue(msgspec.Struct, frozen=True):
    def to_json(self) -> dict[str, Any]:
        return {"a": None, "b": [1]}


def test_null_members_of_a_to_json_value_are_dropped() -> None:
    """A value with ``to_json`` is converted to JSON before null members are removed."""
    assert drop_nulls(FrozenMap(told=JsonValue())) == {"told": {"b": [1]}}
