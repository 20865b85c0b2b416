"""Tasks, tools, environments and agents: what one attempt at a prompt consists of."""
