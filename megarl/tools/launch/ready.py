"""`python -m megarl.tools.launch.ready --nodes N`: wait until the Ray cluster at RAY_ADDRESS has N nodes.

For job scripts. Exits with 0, or after --timeout-s with 5 and one line.
"""

from __future__ import annotations

import argparse
import socket
import sys
import time

from megarl.env import RAY_ADDRESS
from megarl.run.launch import joined_ray

_POLL_S = 0.5
_CONNECT_TIMEOUT_S = 5.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", type=int, required=True)
    parser.add_argument("--timeout-s", type=float, default=300.0)
    arguments = parser.parse_args()
    deadline = time.monotonic() + arguments.timeout_s
    address = RAY_ADDRESS.read()
    if not _wait_for_listener(address, deadline):
        sys.stderr.write(f"no Ray answers at {address} within {arguments.timeout_s:g} s\n")
        return 5
    with joined_ray():
        return _wait_for_nodes(address, arguments.nodes, deadline)


def _wait_for_listener(address: str, deadline: float) -> bool:
    host, _, port = address.rpartition(":")
    while time.monotonic() < deadline:
        try:
            with socket.create_connection((host, int(port)), timeout=_CONNECT_TIMEOUT_S):
                return True
        except OSError:
            time.sleep(_POLL_S)
    return False


def _wait_for_nodes(address: str, num_nodes: int, deadline: float) -> int:
    import ray  # noqa: PLC0415 - Ray reads its environment when it is imported

    ray.init(address=address, log_to_driver=False, configure_logging=False)
    try:
        while True:
            alive = [node["NodeManagerHostname"] for node in ray.nodes() if node["Alive"]]
            if len(alive) >= num_nodes:
                sys.stdout.write(f"{len(alive)} nodes: {', '.join(alive)}\n")
                return 0
            if time.monotonic() > deadline:
                sys.stderr.write(f"{len(alive)} of {num_nodes} nodes have joined: {', '.join(alive)}\n")
                return 5
            time.sleep(_POLL_S)
    finally:
        ray.shutdown()


if __name__ == "__main__":
    sys.exit(main())
