"""A transport that sends responses over WebSocket, with the interface of the HTTP transport."""

from kedge.engines.websocket.transport import SocketTransport

__all__ = [
    "SocketTransport",
]
