"""Scores: built-in scorers, workers for a user's function, judges, reward models."""
