"""The machines under the pools: how long a run waits for them, and when it calls one slow or broken."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt

from megarl.config.section import GpuName, Section


class StragglerConfig(Section):
    """When a rank or an engine counts as slow: beside the median of its kind, window after window."""

    ratio: Annotated[float, Field(gt=1)] = 2
    """Its time over the median's: of a token in an engine, of a fixed product of matrices on a rank."""
    window_s: PositiveFloat = 60
    """How long times are collected before they are compared."""
    windows: PositiveInt = 5
    """Slow windows in a row after which it is named in a warning."""
    drains_engines: bool = True
    """Whether a slow engine is then drained and restarted: its requests keep their tokens and go on elsewhere."""


class ClusterConfig(Section):
    """The machines under the pools."""

    gpu: GpuName | None = None
    """The kind of all GPUs, for which `megarl plan` computes and `megarl train` checks that the run fits; null takes
    what Ray reports, and h100 where there is no Ray to ask."""
    allows_no_token: bool = False
    """Join a Ray cluster without a token if none is given: everyone who reaches such a cluster can run code in it."""
    node_timeout_s: PositiveFloat = 600
    """How long a run that lost a node waits for another one before it ends."""
    lease_s: NonNegativeFloat = 90
    """How long the processes of a run outlive its driver if that is killed: the next `megarl train` of the run adopts
    them, once it has a checkpoint. 0 ends them with the driver."""
    max_node_faults: PositiveInt = 4
    """Accidents of the engines or ranks of one node within an hour after which they move to a spare node, if there is
    one; engines are taken out in any case if other nodes have some."""
    stragglers: StragglerConfig = StragglerConfig()
