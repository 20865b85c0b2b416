"""Engines kept alive and up to date: supervisor, publishers, canary, phases, frozen models."""
