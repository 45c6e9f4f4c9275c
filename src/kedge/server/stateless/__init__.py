"""What the two stateless endpoints share: from a request that holds everything to an answer.

``/v1/chat/completions`` and ``/v1/messages`` each read a request into the items and the parameters
of the Responses API (``Question``); from there on they are one. The same models answer them, and
each tells the answer in a voice of its own (``Voice``).
"""
