"""WebSocket mode: many responses over one connection, and a memory that lives as long as it does.

``connection`` reads messages and keeps the limits, ``inner`` turns each message into a request of the
same app and its answer into messages, ``memory`` is what the connection remembers of responses that
were not stored.
"""
