"""Engine models: serve any engine as a model, so that stateless model servers get conversation state.

The server does not import engines, and a model of the server does not handle HTTP; this package connects the two.
``kedge.providers.open_model`` opens such a model by its model string.
"""

from kedge.server.engine_models.engine_model import EngineModel

__all__ = ["EngineModel"]
