"""The HTTP endpoint at which Prometheus reads the metrics of a run."""

from __future__ import annotations

from threading import Thread
from wsgiref.simple_server import WSGIServer

from prometheus_client import CollectorRegistry, start_http_server

from megarl.errors import MachineError
from megarl.system.network import LOOPBACK


class MetricsEndpoint:
    """Serves one registry at `http://<host>:<port>/metrics`, from construction to `close`."""

    def __init__(self, registry: CollectorRegistry, *, port: int, host: str = LOOPBACK) -> None:
        self._host = host
        self._server, self._thread = _listen(registry, host, port)

    @property
    def address(self) -> str:
        return f"{self._host}:{self._server.server_port}"

    @property
    def url(self) -> str:
        return f"http://{self.address}/metrics"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(timeout=5)


def _listen(registry: CollectorRegistry, host: str, port: int) -> tuple[WSGIServer, Thread]:
    try:
        return start_http_server(port, addr=host, registry=registry)
    except OSError as error:
        raise MachineError(
            f"observe.metrics_port: cannot listen on {host}:{port}: {error.strerror}; "
            "choose another port, 0 for any free one, or null for none"
        ) from error
