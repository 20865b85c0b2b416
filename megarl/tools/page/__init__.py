"""The run page: curves, timeline and rollouts of a run in a browser."""
