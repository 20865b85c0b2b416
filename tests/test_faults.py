from __future__ import annotations

import errno
import json
import re
from pathlib import Path
from typing import get_args

import pytest

from megarl import faults
from megarl.env import FAULTS
from megarl.faults import Point, reach

PATH = Path("checkpoints/step_000004.tmp/model")


def plan(monkeypatch: pytest.MonkeyPatch, **fault: object) -> None:
    monkeypatch.setenv(FAULTS.name, json.dumps([fault]))


def test_nothing_happens_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(FAULTS.name, raising=False)
    reach("renamed", PATH)


@pytest.mark.parametrize("fault", [{"rank": 1}, {"step": 4}, {"rank": 1, "step": 4}, {}])
def test_a_fault_happens_where_it_is_meant(monkeypatch: pytest.MonkeyPatch, fault: dict[str, int]) -> None:
    plan(monkeypatch, point="file_written", kind="ENOSPC", **fault)
    with pytest.raises(OSError, match="No space left on device") as caught:
        reach("file_written", PATH, rank=1)
    assert caught.value.errno == errno.ENOSPC


@pytest.mark.parametrize("fault", [{"rank": 0}, {"step": 5}, {"rank": 1, "step": 40}, {"point": "renamed"}])
def test_and_nowhere_else(monkeypatch: pytest.MonkeyPatch, fault: dict[str, int | str]) -> None:
    plan(monkeypatch, **{"point": "file_written", "kind": "kill", **fault})
    reach("file_written", PATH, rank=1)


def test_every_point_is_explained() -> None:
    explained = re.findall(r"^    (\w+) +(?:driver|rank)", faults.__doc__ or "", re.MULTILINE)
    assert tuple(explained) == get_args(Point)
