"""``POST /v1/messages``: the stateless API of Anthropic.

``shapes`` say what a request may be, ``order`` how its messages must follow each other, ``reading``
turns it into a question, ``voice`` tells the answer, ``words`` say what is wrong as this API does.
"""
