"""Tests of the judge of ``make bench-peers``, which counts incoherent requests."""

from typing import Any

from benchmarks.peers.judge import Judge

from for_each import for_each
from kedge.server.request_log import RecordedRequest


def make_request(*texts: str) -> RecordedRequest:
    """Return a request whose context has these messages of user and assistant in turn."""
    roles = ("user", "assistant")
    context: Any = tuple({"role": roles[n % 2], "content": t} for n, t in enumerate(texts))
    return RecordedRequest("POST", "/v1/responses", "req", raw=b"{}", model_items=context)


def answer(text: str) -> list[dict[str, Any]]:
    """Return the output of a response."""
    return [{"role": "assistant", "content": text}]


def start_judge() -> Judge:
    """Return a judge of a conversation with one message and its answer."""
    judge = Judge()
    judge.judge_turn("a", [make_request("a")], [answer("b")], "")
    return judge


@for_each(("first", "incoherent"), [("x", 0), ("a", 1)])
def test_the_context_of_the_program_is_coherent(first: str, incoherent: int) -> None:
    """After an edit, its text is coherent, and the text before it is not."""
    judge = start_judge()
    judge.apply({"op": "edit", "turn": 0, "text": "x"})
    judge.judge_turn("c", [make_request(first, "b", "c")], [answer("d")], "")
    assert (judge.score.requests, judge.score.incoherent) == (2, incoherent)


def test_a_discarded_answer_is_not_counted() -> None:
    """An answer to an incomplete request is not counted if the library then sends the full history."""
    judge = start_judge()
    requests = [make_request("c"), make_request("a", "b", "c")]
    judge.judge_turn("c", requests, [answer("?"), answer("d")], "")
    assert judge.score.incoherent == 0
    judge.judge_turn("e", [make_request("a", "b", "c", "d", "e")], [answer("f")], "")
    assert judge.score.incoherent == 0


def test_an_error_does_not_change_the_conversation() -> None:
    """A failed message is not part of the conversation, but its bytes are counted."""
    judge = start_judge()
    rejected = RecordedRequest("POST", "/v1/responses", "req", raw=b"{}")
    judge.judge_turn("c", [rejected], [], "BadRequestError")
    judge.judge_turn("d", [make_request("a", "b", "d")], [answer("e")], "")
    assert (judge.score.errors, judge.score.incoherent, judge.score.bytes) == (1, 0, 6)
