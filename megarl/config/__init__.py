"""The recipe: its schema, how it is read, and how it is checked. Imports neither torch nor an engine."""
