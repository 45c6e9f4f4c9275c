"""What a server remembers: token accounting (`tokens`), evidence (`evidence`) and decisions (`judge`).

A plan says which stored response a request relies on. This package decides whether the server may be relied on,
whether its answer must be held back, what its token count shows, and what follows from a loss. Engines, dry runs,
chained clients and the proxy use the same decisions.
"""
