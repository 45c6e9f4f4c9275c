"""Model strings of the server: ``practice``, ``script:FILE``, and whatever ``connect`` knows."""

from typing import Any

from kedge.backends.model import WINDOW, EngineModel
from kedge.errors import CannotConnect
from kedge.practice import Script
from kedge.providers import connect
from kedge.server.models import Model, PracticeModel

OWN = ("practice", "script")
"""Models that need no engine: they answer inside the server."""


def open_model(
    model: str,
    *,
    name: str = "",
    pace: float = 0.0,
    window: int | None = None,
    tokens: float = 1.0,
    stateless: bool = False,
    params: dict[str, Any] | None = None,
    **settings: Any,
) -> Model:
    """Make a model of the server from a model string.

    ``window`` and ``tokens`` say how much it sees, as in ``EngineModel``; ``stateless`` never chains
    upstream; ``params`` go along with every request. Further settings are those of ``connect``, such
    as ``api_key``.
    """
    kind, _, rest = model.partition(":")
    if kind in OWN:
        if kind == "script" and not rest:
            raise CannotConnect("which file? Write script:answers.json")
        script = Script.load(rest) if kind == "script" else None
        made = PracticeModel(script, pace=pace, **({"window": window} if window else {}))
        made.name = name or made.name
        return made
    # Whoever asks this server can try again as well as it could.
    engine = connect(model, **{"max_retries": 0, **settings})
    shown = name or rest.rpartition("#")[2] or kind
    return EngineModel(
        shown,
        engine,
        window=window or WINDOW,
        tokens=tokens,
        stateless=stateless,
        params=params,
    )
