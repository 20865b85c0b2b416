"""Runs on disk: folders, manifests, tensors, the mirror, resuming."""
