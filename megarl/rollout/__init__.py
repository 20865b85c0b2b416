"""Prompts to scored groups: generator, workers, groups, teachers."""
