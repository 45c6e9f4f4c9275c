"""Call ids of output items: valid ids of a model are retained."""

from for_each import for_each
from kedge.server.models import ItemOpened
from kedge.server.output_writer import OutputWriter

KIMI_CALL_ID = "functions.get_weather:0"


@for_each(
    ("calls", "chosen", "is_retained"),
    [
        ("call", "call_1", True),
        ("call", KIMI_CALL_ID, True),
        ("call", "c" * 64, True),
        ("call", "c" * 65, False),
        ("call", "", False),
        ("toolu", "toolu_1", True),
        ("toolu", KIMI_CALL_ID, False),
        ("toolu", "", False),
    ],
)
def test_invalid_call_id_is_replaced(calls: str, chosen: str, is_retained: bool) -> None:
    """A call id that the server would reject in a request is replaced by a generated one."""
    writer = OutputWriter("0a1b", 3, call_prefix=calls)
    writer.feed(ItemOpened("function_call", "get_weather", chosen))
    (item,) = writer.items
    assert (item["call_id"] == chosen) is is_retained
    assert item["call_id"].startswith(chosen if is_retained else f"{calls}_0a1b")
