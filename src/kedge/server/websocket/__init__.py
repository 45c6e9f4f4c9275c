"""WebSocket mode: many responses over one connection, which remembers unstored responses.

``connection`` reads messages and enforces the limits, ``asgi_bridge`` sends each message as a request
through the same app and its response as messages, ``memory`` holds the unstored responses.
"""
