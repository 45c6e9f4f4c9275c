"""Evidence that a server remembers what it stored, and the decision to rely on it.

``server_evidence`` has what is known about a server, ``tokens`` what its token counts show, ``judge`` the decision
before a request and the verdict on its answer, and ``object_claims`` the claims on conversation objects.

A plan says which stored response a request relies on. This package decides whether the server may be relied on,
whether its answer must be held back, what its token count shows, and what follows from a loss. Engines, dry runs,
chained clients and the proxy use the same decisions.
"""
