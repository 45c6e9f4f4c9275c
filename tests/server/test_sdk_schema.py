"""Tests of the request types that are derived from the openai and anthropic packages."""

import json

from kedge.server.schema.items import ITEM_TYPES


def test_the_file_has_the_types_of_the_installed_packages() -> None:
    """The file is what ``make schema`` writes, and every item of the packages is one of the server."""
    from sdk_schema import PATH, derive_schema, encode_schema  # imports anthropic, which is slow

    assert PATH.read_text() == encode_schema()
    derived = derive_schema()
    assert json.loads(PATH.read_text()) == derived
    assert ITEM_TYPES.keys() == derived["responses"]["items"].keys() | {"message", "item_reference"}
