"""The practice model: built in, deterministic, and usable without a network or a key.

It is a pure function from the effective context of a request to an answer, so that tests and users can see
which context a server has stored. It uses items of the Responses API and no other part of Kedge.
``docs/practice-model.md`` lists its phrases.
"""

from kedge.server.practice_model.model import answer
from kedge.server.practice_model.request import OutputPart, PracticeOutput, PracticeRequest
from kedge.server.practice_model.script import Script

__all__ = ["OutputPart", "PracticeOutput", "PracticeRequest", "Script", "answer"]
