"""The names of the stages of `megarl doctor --cluster`, in their order. Loads without Ray."""

from __future__ import annotations

UPDATE = "update"
STAGES = ("nodes", "machines", "devices", "node links", "node pairs", "all nodes", "network", "storage", UPDATE)
