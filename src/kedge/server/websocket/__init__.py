"""WebSocket mode: many responses over one connection, which also has unstored responses in memory.

``connection`` reads messages and enforces the limits, ``asgi_bridge`` sends each message as a request
through the same app and its response as messages, ``memory`` has the unstored responses.
"""
