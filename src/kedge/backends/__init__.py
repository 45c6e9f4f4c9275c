"""Backends: serve any engine as a model, so that stateless model servers get conversation state.

    settings = Settings(model=open_model("ollama:llama3.2"))

The server does not import engines, and a model of the server does not handle HTTP; this package connects
the two. ``load_models`` reads several models by name from a file.
"""

from kedge.backends.engine_model import EngineModel
from kedge.backends.models_file import Models, load_models, open_model

__all__ = ["EngineModel", "Models", "load_models", "open_model"]
