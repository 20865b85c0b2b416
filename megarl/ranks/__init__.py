"""Trainer processes: start, calls, hangs, sending."""
