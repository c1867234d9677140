"""The MCP server: Holdfast for agents, over the Model Context Protocol on standard input and output.

It has no rules of its own: each tool calls the layers below, in a worker thread. The server process holds
and renews the leases and claims of its client, and releases them when the client disconnects.
"""
