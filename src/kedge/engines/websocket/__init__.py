"""The Responses API over WebSocket: a few connections, each with lanes, and what they remember.

``lane`` is one lane, ``connection`` one connection with its reader, ``pool`` finds the lane for a
request, ``transport`` has the interface of the HTTP transport.
"""

from kedge.engines.websocket.transport import SocketTransport

__all__ = ["SocketTransport"]
