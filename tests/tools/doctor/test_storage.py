from __future__ import annotations

from pathlib import Path

import pytest

from megarl.tools.doctor import CheckStatus
from megarl.tools.doctor.storage import check_storage, read_file, write_file

SIZE = 1 << 20


def test_a_node_reads_what_another_wrote(tmp_path: Path) -> None:
    path = tmp_path / "new" / "probe_3"
    assert write_file(path, SIZE, 3) > 0
    assert read_file(path, SIZE, 3) > 0
    with pytest.raises(AssertionError, match="other bytes"):
        read_file(path, SIZE, 4)
    with pytest.raises(AssertionError, match="1048576 of 2097152 bytes"):
        read_file(path, 2 * SIZE, 3)


def test_the_file_system_is_judged_as_one() -> None:
    seconds = {"n0": 1.0, "n1": 2.0}
    fast, read = check_storage(Path("/runs"), seconds, seconds, num_bytes=4 << 30, planned=5.0)
    assert fast.status is CheckStatus.OK, fast
    assert read.status is CheckStatus.OK
    slow, _ = check_storage(Path("/runs"), seconds, seconds, num_bytes=1 << 30, planned=5.0)
    assert slow.status is CheckStatus.ERROR
    assert "cluster.file_system_gb_per_s=1.1" in slow.remedy


def test_a_folder_that_is_not_shared_is_an_error() -> None:
    checks = check_storage(Path("/runs"), {"n0": 1.0, "n1": 1.0}, {"n0": 1.0}, num_bytes=SIZE, planned=None)
    assert checks[-1].found == "n1 cannot read in /runs what another node wrote"
    assert checks[-1].status is CheckStatus.ERROR
