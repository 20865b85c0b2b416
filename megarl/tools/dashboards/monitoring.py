"""The files for Grafana and Prometheus, generated from the dashboards and the alerts.

Run as a module, it writes the copies in the package; a test compares them with what it would write.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import yaml

from megarl.errors import MachineError
from megarl.tools.dashboards.alerts import to_rules
from megarl.tools.dashboards.learning_boards import OVERVIEW, TRAINER
from megarl.tools.dashboards.panels import complete, to_grafana
from megarl.tools.dashboards.serving_boards import OPERATIONS, ROLLOUT

DASHBOARDS = complete((OVERVIEW, ROLLOUT, TRAINER, OPERATIONS))
"""Every metric of the catalogue is on one of them."""
FOLDER = Path(__file__).parent / "files"
RULES_FILE = "alerts.yaml"


def monitoring_files() -> Mapping[str, str]:
    """Return the contents by file name."""
    files = {f"{board.uid}.json": json.dumps(to_grafana(board), indent=2) + "\n" for board in DASHBOARDS}
    rules = yaml.safe_dump(to_rules(), sort_keys=False, width=1000, allow_unicode=True)
    return {**files, RULES_FILE: "# Written from megarl/tools/dashboards/alerts.py.\n" + rules}


def write_monitoring(folder: Path) -> list[Path]:
    """Write all files into a folder, which is created if needed."""
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
