"""The Responses API over WebSocket: a few connections, each with lanes that remember a response.

``connection`` has one connection with its lanes and its reader, ``pool`` finds the lane for a request,
``transport`` has the interface of the HTTP transport.
"""

from kedge.engines.websocket.transport import SocketTransport

__all__ = ["SocketTransport"]
