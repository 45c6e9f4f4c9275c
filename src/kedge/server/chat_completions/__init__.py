"""``POST /v1/chat/completions``: the stateless API that most model servers speak.

``shapes`` say what a request may be, ``reading`` turns it into a question, ``voice`` tells the
answer, ``refusals`` are the sentences that only this API has.
"""
