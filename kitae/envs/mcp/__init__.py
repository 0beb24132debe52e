"""Tools of MCP servers: the environment, and the process that speaks with a server."""
