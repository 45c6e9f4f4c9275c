"""``POST /v1/messages``: the stateless API of Anthropic.

``schema`` has the parameters of a request, ``parse`` checks the order of its messages and converts it to
items, ``serialize`` writes the response, ``errors`` has the errors of this API.
"""
