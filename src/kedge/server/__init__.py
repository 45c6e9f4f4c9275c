"""A local server for the Responses API: strict, stateful, offline.

The client of Kedge is tested against it, so it shares no code with the client's planner: no module of
this package imports ``kedge.planning``, ``kedge.turns`` or ``kedge.events``.

- ``kedge.server.app.create_app`` builds the ASGI app.
- ``kedge.server.settings.Settings`` configures it.
- ``kedge.server.models.Model`` is the interface of the models that write the answers.
- ``kedge.testing.serve`` runs a server in a thread, ``kedge serve`` in a process.
"""

from typing import TYPE_CHECKING

from kedge._internal.lazy_names import make_getattr

if TYPE_CHECKING:
    from kedge.server.app import create_app
    from kedge.server.engine_models.engine_model import EngineModel
    from kedge.server.models import Model, PracticeModel
    from kedge.server.practice_model.script import Script
    from kedge.server.settings import Settings
else:
    __getattr__ = make_getattr(
        __name__,
        {
            "EngineModel": "kedge.server.engine_models.engine_model",
            "Model": "kedge.server.models",
            "PracticeModel": "kedge.server.models",
            "Script": "kedge.server.practice_model.script",
            "Settings": "kedge.server.settings",
            "create_app": "kedge.server.app",
        },
    )

__all__ = [
    "EngineModel",
    "Model",
    "PracticeModel",
    "Script",
    "Settings",
    "create_app",
]
