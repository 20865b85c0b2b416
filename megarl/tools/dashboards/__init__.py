"""The files for Grafana and Prometheus: dashboards of every metric, and alerts. `scripts.dashboards` writes them."""

from __future__ import annotations

from pathlib import Path

from megarl.errors import MachineError

FOLDER = Path(__file__).parent / "files"


def write_monitoring(folder: Path) -> list[Path]:
    """Copy all files into a folder, which is created if needed."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        paths = []
        for source in sorted(FOLDER.iterdir()):
            path = folder / source.name
            path.write_bytes(source.read_bytes())
            paths.append(path)
    except OSError as error:
        raise MachineError(f"{folder}: cannot be written: {error.strerror}") from error
    return paths
