"""Tests of the request types that are derived from the openai and anthropic packages."""

import json

from kedge.server.schema.items import ITEM_TYPES
from sdk_schema import PATH, derive_schema, encode_schema


def test_the_file_has_the_types_of_the_installed_packages() -> None:
    """The file is what ``make schema`` writes."""
    assert PATH.read_text() == encode_schema()


def test_the_file_is_json_with_all_tables() -> None:
    """The lines of the file are only a layout of the tables."""
    assert json.loads(PATH.read_text()) == derive_schema()


def test_every_item_of_the_packages_is_an_item_of_the_server() -> None:
    """Items are the tables of the file, messages and references."""
    items = derive_schema()["responses"]["items"]
    assert ITEM_TYPES.keys() == items.keys() | {"message", "item_reference"}
