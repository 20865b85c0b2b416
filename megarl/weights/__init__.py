"""Slices, layouts and plans (pure), and the executors that move bytes (torch)."""
