"""The local Responses API server: strict, stateful, offline.

It judges Kedge's own client, so it shares nothing with the judged: no module in here imports
``kedge.planning``, ``kedge.turns`` or ``kedge.events``.
"""
