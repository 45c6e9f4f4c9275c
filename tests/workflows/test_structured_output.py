"""Forms: what is asked of a server, and what of its answers is taken."""

from typing import Any

import pytest
from pydantic import BaseModel

from kedge.errors import InvalidWorkflow
from kedge.workflows.structured_output import SchemaMismatch, to_output_schema


class Mast(BaseModel):
    """A mast, which may have a height."""

    height: int = 10


class Ship(BaseModel):
    """A ship with masts."""

    name: str
    masts: list[Mast]


class Boat(BaseModel):
    """A boat, of which everything is told."""

    name: str
    oars: int


def test_strictness_is_asked_for_only_where_it_changes_nothing() -> None:
    """A member that may be left out, however deep inside, would have to be null in strict mode."""
    strict = to_output_schema(Boat).request_options()["text"]["format"]
    assert strict["strict"] is True
    assert strict["schema"]["additionalProperties"] is False
    assert "strict" not in to_output_schema(Ship).request_options()["text"]["format"]
    assert "strict" not in to_output_schema({"type": "array"}).request_options()["text"]["format"]


@pytest.mark.parametrize(
    "text", ['{"name": "Argo", "oars": 2}', '```json\n{"name":"Argo","oars":2}\n```']
)
@pytest.mark.parametrize("form", [Boat, Boat.model_json_schema()], ids=["pydantic", "schema"])
def test_an_answer_is_read_with_or_without_a_fence(form: Any, text: str) -> None:
    """As many models write one around it."""
    made = to_output_schema(form)
    assert made.to_json(made.parse(text)) == {"name": "Argo", "oars": 2}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("no", "JSON"),
        ('{"name": "Argo"}', "oars"),
        ('{"name": 1, "oars": "two"}', "oars"),
    ],
)
@pytest.mark.parametrize("form", [Boat, Boat.model_json_schema()], ids=["pydantic", "schema"])
def test_what_does_not_fit_is_told_by_name(form: Any, text: str, words: str) -> None:
    """In lines that a model can act on."""
    with pytest.raises(SchemaMismatch) as caught:
        to_output_schema(form).parse(text)
    assert words in str(caught.value)
    assert all(line.startswith("- ") for line in str(caught.value).splitlines())


def test_many_problems_are_not_all_told() -> None:
    """A few are enough to begin with."""
    schema = {"type": "array", "items": {"type": "string"}}
    with pytest.raises(SchemaMismatch) as caught:
        to_output_schema(schema).parse(str(list(range(20))))
    assert len(str(caught.value).splitlines()) == 9
    assert str(caught.value).endswith("- and 12 more")


@pytest.mark.parametrize("wrong", [3, "text", {"type": "boat"}])
def test_what_is_no_form_is_refused(wrong: Any) -> None:
    """Before anything is asked."""
    with pytest.raises(InvalidWorkflow):
        to_output_schema(wrong)
