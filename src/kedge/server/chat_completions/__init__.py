"""``POST /v1/chat/completions``: the stateless API of most model servers.

``schema`` has the parameters of a request, ``parse`` converts it to items and has the errors of this
API, ``serialize`` writes the response.
"""
