"""launch/monitoring: what the two services mount is there, and Prometheus accepts its configuration."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from megarl.observe.endpoint import LINKS_FOLDER
from megarl.tools.dashboards import FOLDER
from scripts.dashboards.monitoring import RULES_FILE
from tests.packages import program
from tests.repository import ROOT

MONITORING = ROOT / "launch" / "monitoring"


def test_everything_that_is_mounted_is_in_the_repository() -> None:
    services = yaml.safe_load((MONITORING / "compose.yaml").read_text())["services"]
    mounted = [volume.split(":")[0] for service in services.values() for volume in service["volumes"]]
    files = [path for path in mounted if path.startswith(".")]
    assert files
    assert [path for path in files if not (MONITORING / path).exists()] == []


def test_both_services_listen_on_loopback_only() -> None:
    services = yaml.safe_load((MONITORING / "compose.yaml").read_text())["services"]
    assert all(service["network_mode"] == "host" and "ports" not in service for service in services.values())
    assert "--web.listen-address=127.0.0.1:9090" in services["prometheus"]["command"]
    assert services["grafana"]["environment"]["GF_SERVER_HTTP_ADDR"] == "127.0.0.1"


@pytest.mark.needs("prometheus")
def test_prometheus_accepts_its_configuration_and_looks_where_runs_write(tmp_path: Path) -> None:
    shutil.copy(MONITORING / "prometheus.yaml", tmp_path)
    shutil.copy(FOLDER / RULES_FILE, tmp_path)
    done = subprocess.run(
        [program("promtool"), "check", "config", str(tmp_path / "prometheus.yaml")],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (scraped,) = yaml.safe_load((MONITORING / "prometheus.yaml").read_text())["scrape_configs"]
    assert scraped["file_sd_configs"][0]["files"] == [f"/runs/{LINKS_FOLDER}/*.json"]


def test_grafana_is_given_the_folder_that_is_mounted() -> None:
    provider = yaml.safe_load((MONITORING / "grafana/provisioning/dashboards/megarl.yaml").read_text())["providers"][0]
    grafana = yaml.safe_load((MONITORING / "compose.yaml").read_text())["services"]["grafana"]
    assert any(volume.split(":")[1] == provider["options"]["path"] for volume in grafana["volumes"])
