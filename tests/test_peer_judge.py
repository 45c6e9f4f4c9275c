"""The judge of ``make bench-peers``: what it counts as incoherent."""

from typing import Any

from benchmarks.peers.judge import Judge

from kedge.server.request_log import RecordedRequest


def make_request(*texts: str) -> RecordedRequest:
    """A request for which the model saw these messages of the user and the model in turn."""
    roles = ("user", "assistant")
    context: Any = tuple({"role": roles[n % 2], "content": t} for n, t in enumerate(texts))
    return RecordedRequest("POST", "/v1/responses", "req", raw=b"{}", context=context)


def answer(text: str) -> list[dict[str, Any]]:
    """The output of a response."""
    return [{"role": "assistant", "content": text}]


def test_a_context_that_the_program_has_is_coherent() -> None:
    """Turn by turn, also after an edit that reached the model."""
    judge = Judge()
    judge.judge_turn("a", [make_request("a")], [answer("b")], "")
    judge.apply({"op": "edit", "turn": 0, "text": "x"})
    judge.judge_turn("c", [make_request("x", "b", "c")], [answer("d")], "")
    assert (judge.score.requests, judge.score.incoherent) == (2, 0)


def test_an_edit_that_did_not_reach_the_model_is_incoherent() -> None:
    """The server still has the old text."""
    judge = Judge()
    judge.judge_turn("a", [make_request("a")], [answer("b")], "")
    judge.apply({"op": "edit", "turn": 0, "text": "x"})
    judge.judge_turn("c", [make_request("a", "b", "c")], [answer("d")], "")
    assert judge.score.incoherent == 1


def test_a_discarded_answer_is_not_counted() -> None:
    """The first request lacked the history; the library noticed it and sent everything."""
    judge = Judge()
    judge.judge_turn("a", [make_request("a")], [answer("b")], "")
    requests = [make_request("c"), make_request("a", "b", "c")]
    judge.judge_turn("c", requests, [answer("?"), answer("d")], "")
    assert judge.score.incoherent == 0
    judge.judge_turn("e", [make_request("a", "b", "c", "d", "e")], [answer("f")], "")
    assert judge.score.incoherent == 0


def test_an_error_leaves_the_conversation_as_it_was() -> None:
    """A failed message is no part of it; its bytes count."""
    judge = Judge()
    judge.judge_turn("a", [make_request("a")], [answer("b")], "")
    rejected = RecordedRequest("POST", "/v1/responses", "req", raw=b"{}")
    judge.judge_turn("c", [rejected], [], "BadRequestError")
    judge.judge_turn("d", [make_request("a", "b", "d")], [answer("e")], "")
    assert (judge.score.errors, judge.score.incoherent, judge.score.bytes) == (1, 0, 6)
