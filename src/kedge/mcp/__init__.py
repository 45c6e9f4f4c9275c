"""Model Context Protocol: tools of MCP servers for Kedge, and Kedge's store as an MCP server.

``mcp_tools`` connects to a server and returns a toolbox; ``kedge.mcp.server`` serves a store. Both use the official
package (extra ``mcp``), which is imported when one of them is used.
"""

from kedge.mcp.client_tools import McpTools, mcp_tools

__all__ = [
    "McpTools",
    "mcp_tools",
]
