"""A thousand hostile files: each is refused by our error or read, in bounded memory and time."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.data.hostile_images import KINDS, SPARE_BYTES, Reading, write_all
from tests.repository import ROOT

MAX_SECONDS = 10.0
"""Seconds of the processor; the slowest file takes a tenth of it."""
READABLE = {"png_bomb_in_full", "in_other_colours", "turned"}
"""Kinds that are right, whatever else they are."""
REFUSED = {"other_kinds", "without_size", "animated", "strip"}


def read_all(folder: Path, num: int, *, seed: int) -> list[Reading]:
    write_all(folder, num, seed=seed)
    words = [sys.executable, "-m", "tests.data.hostile_images", str(folder)]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return [Reading(**json.loads(line)) for line in done.stdout.splitlines()]


@pytest.mark.patient
@pytest.mark.parametrize("num", [10 * len(KINDS), pytest.param(1000, marks=pytest.mark.slow)])
def test_a_hostile_image_is_read_or_refused(num: int, tmp_path: Path) -> None:
    found = read_all(tmp_path, num, seed=num)
    assert len(found) == num
    assert [each for each in found if each.outcome not in ("read", "refused")] == []
    assert [each for each in found if each.seconds > MAX_SECONDS] == []
    assert max(each.peak_bytes for each in found) < SPARE_BYTES
    assert {each.kind for each in found if each.outcome == "read"} >= READABLE
    assert [each for each in found if each.kind in READABLE and each.outcome != "read"] == []
    assert [each for each in found if each.kind in REFUSED and each.outcome != "refused"] == []
