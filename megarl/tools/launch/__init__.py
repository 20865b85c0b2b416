"""Jobs for schedulers, rendered from a recipe."""
