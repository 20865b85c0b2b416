"""Write the files for Grafana and Prometheus into the package, from the dashboards and the alerts.

Run `python -m scripts.dashboards.monitoring` after a change of either; a test compares the files with what it writes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

import yaml

from megarl.tools.dashboards import FOLDER
from scripts.dashboards.alerts import to_rules
from scripts.dashboards.learning_boards import OVERVIEW, TRAINER
from scripts.dashboards.panels import complete, to_grafana
from scripts.dashboards.serving_boards import OPERATIONS, ROLLOUT

DASHBOARDS = complete((OVERVIEW, ROLLOUT, TRAINER, OPERATIONS))
"""Every metric of the catalogue is on one of them."""
RULES_FILE = "alerts.yaml"


def monitoring_files() -> Mapping[str, str]:
    """Return the contents by file name."""
    files = {f"{board.uid}.json": json.dumps(to_grafana(board), indent=2) + "\n" for board in DASHBOARDS}
    rules = yaml.safe_dump(to_rules(), sort_keys=False, width=1000, allow_unicode=True)
    return {**files, RULES_FILE: "# Written from scripts/dashboards/alerts.py.\n" + rules}


if __name__ == "__main__":
    for name, text in monitoring_files().items():
        (FOLDER / name).write_text(text)
