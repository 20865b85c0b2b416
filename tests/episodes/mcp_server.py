"""A server of the Model Context Protocol, for tests: `python -m tests.episodes.mcp_server PORT [MARK]`."""

from __future__ import annotations

import sys
import time
from pathlib import Path

from mcp.server.mcpserver import MCPServer
from mcp.types import ImageContent, TextContent


def serve(port: int, mark: Path | None) -> None:
    server = MCPServer("numbers")

    @server.tool()
    def add(a: int, b: int) -> str:
        """Add two numbers."""
        return str(a + b)

    @server.tool()
    def fail(reason: str) -> str:
        """Fail."""
        raise ValueError(reason)

    @server.tool()
    def wait(seconds: float) -> str:
        """Wait."""
        time.sleep(seconds)
        return "waited"

    @server.tool()
    def draw(side: int) -> list[TextContent | ImageContent]:
        """Draw a square."""
        image = ImageContent(data="iVBORw0KGgo=", mime_type="image/png")
        return [TextContent(text=f"a square of {side}"), image]

    if mark is not None and mark.exists():

        @server.tool()
        def later() -> str:
            """Exist since a later start."""
            return ""

    server.run("streamable-http", host="127.0.0.1", port=port)


if __name__ == "__main__":
    serve(int(sys.argv[1]), Path(sys.argv[2]) if len(sys.argv) > 2 else None)
