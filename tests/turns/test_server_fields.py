"""What of a provider's item is content."""

from dataclasses import dataclass
from typing import Any

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
def test_no_object_keeps_a_null_member(value: Any) -> None:
    """Null members go, at any depth; a null in a list keeps its place."""
    cleaned = thaw(drop_nulls(FrozenMap(a=value)))
    assert not has_null_member(cleaned)
    if not has_null_member({"a": value}):
        assert FrozenMap(cleaned) == FrozenMap(a=value)
    assert thaw(drop_nulls(FrozenMap(a=[None, 1, None]))) == {"a": [None, 1, None]}


@given(opaque_items())
def test_the_essence_has_neither_id_nor_status_unless_they_are_content(item: Any) -> None:
    """Only the types in the tables keep them, and every other member stays."""
    retained = strip_server_fields(FrozenMap(item))
    shown = {"type", *(k for k, v in item.items() if v is not None)}
    hidden = {
        *([] if item["type"] in ID_IS_CONTENT else ["id"]),
        *([] if item["type"] in STATUS_IS_CONTENT else ["status"]),
    }
    assert retained.keys() == shown - hidden
    assert strip_server_fields(retained) == retained


def test_the_id_of_an_image_is_its_content_if_nothing_else_is() -> None:
    """A program edits a generated image by its id alone: another id is another image."""
    first, second = (
        FrozenMap({"type": "image_generation_call", "id": name, "status": "completed"})
        for name in ("ig_1", "ig_2")
    )
    assert strip_server_fields(first) != strip_server_fields(second)
    assert item_from_block(OpaqueBlock(first))["id"] == "ig_1"
    complete = FrozenMap({**first, "result": "aGk="})
    assert "id" not in strip_server_fields(complete)


@dataclass(frozen=True)
class JsonValue:
    def to_json(self) -> dict[str, Any]:
        return {"a": None, "b": [1]}


def test_a_value_with_its_own_json_form_has_no_null_members() -> None:
    """It is told first, and cleaned like any other."""
    assert drop_nulls(FrozenMap(told=JsonValue())) == {"told": {"b": [1]}}
