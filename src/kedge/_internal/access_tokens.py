"""Named tokens, with their counts and reservations, that the server, the page and the proxy check."""

import msgspec


class AccessToken(msgspec.Struct, frozen=True):
    """A named token, without its secret.

    Attributes:
        name: Its name.
        namespace: The namespace of its user, which it gives access to. Empty for the administrator.
        scopes: Its scopes: ``server``, ``page``, ``api``, ``metrics``.
        requests_per_minute: The maximum number of requests per minute, or None.
        tokens_per_minute: The maximum number of tokens of models per minute, or None.
        created_at: When it was added, in seconds since 1970.
    """

    name: str
    namespace: str
    scopes: frozenset[str]
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    created_at: float = 0.0


class TokenUse(msgspec.Struct, frozen=True):
    """The counts of a token in the current minute.

    Attributes:
        requests: The requests.
        tokens: The tokens of models.
        seconds_left: The seconds until the next minute.
    """

    requests: int
    tokens: int
    seconds_left: float


class TokenReservation(msgspec.Struct, frozen=True):
    """Tokens that are counted for a request before its model uses them.

    Attributes:
        name: The name of the token.
        tokens: The reserved tokens.
        minute: The minute in which they are counted.
    """

    name: str
    tokens: int
    minute: int
