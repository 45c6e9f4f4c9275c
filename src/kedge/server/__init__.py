"""A local server for the Responses API: strict, stateful, offline.

The client of Kedge is tested against it, so it shares no code with the client's planner: no module of
this package imports ``kedge.planning``, ``kedge.turns`` or ``kedge.events``.

- ``kedge.server.app.create_app`` builds the ASGI app.
- ``kedge.server.settings.Settings`` configures it.
- ``kedge.server.models.Model`` is the interface of the models that write the answers.
- ``kedge.testing.serve`` runs a server in a thread, ``kedge serve`` in a process.
"""
