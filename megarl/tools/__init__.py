"""Instruments that look at recipes, machines and runs, one module or folder each; none knows another."""
