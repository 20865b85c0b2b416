"""Faults of nodes: what counts as one accident, what is too old, and what is forgiven."""

from __future__ import annotations

from megarl.cluster.node_faults import WITHIN_S, NodeFaults


def test_faults_within_seconds_are_one_accident_and_old_ones_do_not_count() -> None:
    now = 0.0
    faults = NodeFaults(lambda: now)
    assert faults.count("a") == 1
    now = 29.0
    assert faults.count("a") == 1
    assert faults.count("b") == 1
    now = 60.0
    assert faults.count("a") == 2
    now = WITHIN_S + 1.0
    assert faults.count("a") == 2, "the first is too old"


def test_a_node_that_is_taken_back_has_no_faults() -> None:
    faults = NodeFaults(lambda: 0.0)
    faults.count("a")
    faults.excluded |= {"a", "b"}
    faults.forgive("a")
    assert faults.excluded == {"b"}
    assert faults.count("a") == 1
