"""The files that Grafana and Prometheus read, as they are in the package: written from the dashboards and the alerts.

Run as a module it writes them anew; a test holds them to what it would write.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import yaml

from megarl.errors import MachineError
from megarl.tools.dashboards.alerts import to_rules
from megarl.tools.dashboards.boards import DASHBOARDS
from megarl.tools.dashboards.panels import to_grafana

FOLDER = Path(__file__).parent / "files"
RULES_FILE = "alerts.yaml"


def monitoring_files() -> Mapping[str, str]:
    """Content by file name."""
    files = {f"{board.uid}.json": json.dumps(to_grafana(board), indent=2) + "\n" for board in DASHBOARDS}
    rules = yaml.safe_dump(to_rules(), sort_keys=False, width=1000, allow_unicode=True)
    return {**files, RULES_FILE: "# Written from megarl/tools/dashboards/alerts.py.\n" + rules}


def write_monitoring(folder: Path) -> list[Path]:
    """All of them into a folder that may not be there yet."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        paths = []
        for name, text in monitoring_files().items():
            path = folder / name
            path.write_text(text)
            paths.append(path)
    except OSError as error:
        raise MachineError(f"{folder}: cannot be written: {error.strerror}") from error
    return paths


if __name__ == "__main__":
    write_monitoring(FOLDER)
