"""Sentences for the reasons that records contain."""

HEALING_TEXTS = {
    "gone": "the server no longer had the earlier response; the full conversation was resent",
    "unsupported": "the server does not support chaining; the full conversation was resent",
    "forgot": "the server answered without the earlier context; the full conversation was resent",
    "reasoning": "the server could not read the encrypted reasoning; the request was resent without it",
    "include": "the model has no encrypted reasoning; the request was resent without asking for it",
    "empty_input": "the server rejects an empty input; the full conversation was resent",
    "conversation": "the conversation object no longer existed; a new one was created",
    "unproven": "the server did not show that it used the stored context; the full conversation was resent",
    "audit": "an audit found different server data; the full conversation was resent",
    "format": "the server does not support structured output; the schema was sent as text",
}
"""How a request was healed, by the reason."""

LOST_TEXTS = {
    "gone": "the server no longer has this response",
    "unsupported": "the server does not support chaining",
    "forgot": "the server answered without the earlier context",
    "audit": "an audit found different server data",
}
"""Why a response cannot be continued on its server, by the reason in the store."""
