"""Prompt tables to prompts, their order, and the packing of samples into batches. Uses pyarrow, no torch."""
