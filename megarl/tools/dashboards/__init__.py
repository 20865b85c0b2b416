"""The files for Grafana and Prometheus: dashboards of every metric, and alerts. `scripts.dashboards` writes them."""

from __future__ import annotations

from pathlib import Path

from megarl.errors import writing

FOLDER = Path(__file__).parent / "files"


def write_monitoring(folder: Path) -> list[Path]:
    """Copy all files into a folder, which is created if needed."""
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        paths = []
        for source in sorted(FOLDER.iterdir()):
            path = folder / source.name
            path.write_bytes(source.read_bytes())
            paths.append(path)
    return paths
