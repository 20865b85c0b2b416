"""The built-in scorers: one file each, each a pure `compute_score` with the signature of a user's function."""
