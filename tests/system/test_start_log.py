from __future__ import annotations

import logging
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from megarl.engine.log import EngineLog
from megarl.observe.events import Record, RunStarted
from megarl.observe.observing import logging_to
from megarl.system.start_log import note_piece, piece_line, read_pieces
from megarl.tools.page.timeline import last_start, start_events

LONG_AGO = datetime(2000, 1, 1, tzinfo=UTC)


def test_pieces_of_all_processes_are_read_in_their_order(tmp_path: Path) -> None:
    with logging_to(tmp_path / "megarl.log"):
        logging.getLogger("megarl.other").info("what=nothing seconds=3.0")
        note_piece("Ray", began=time.time() - 2.0)
    (tmp_path / "ranks").mkdir()
    now = time.time()
    earlier = piece_line("imports", began=now - 30.0, ended=now - 20.0)
    (tmp_path / "ranks" / "rank_3.log").write_text(f"a line\n{earlier}\xff\n")

    pieces = read_pieces(tmp_path, since=LONG_AGO)
    assert [(piece.process, piece.what) for piece in pieces] == [("rank_3", "imports"), ("megarl", "Ray")]
    assert [piece.seconds for piece in pieces] == pytest.approx([10.0, 2.0], abs=0.1)
    assert pieces[0].began.timestamp() == pytest.approx(now - 30.0, abs=0.01)
    assert [piece.what for piece in read_pieces(tmp_path, since=datetime.now(UTC) - timedelta(seconds=10))] == ["Ray"]

    started = RunStarted(
        name="", folder="", algorithm="", steps=1, megarl_version="", metrics_url=None, resumed_step=0, recipe={}
    )
    (event,) = start_events(last_start(tmp_path, [Record(sequence=0, time=pieces[1].ended, event=started)]))
    assert (event["tid"], event["name"]) == ("megarl", "Ray")


ENGINE_LINES = (
    "server_args=ServerArgs(model_path='a')",
    "Init torch distributed begin.",
    "Load weight end. elapsed=0.10 s",
    "Capture target decode CUDA graph begin. backend=full, num_tokens_per_req=1",
    "Capture target decode CUDA graph end. elapsed=3.56 s",
    "max_total_num_tokens=3222597, chunked_prefill_size=8192",
    "The server is fired up and ready to roll!",
    "server_args=",
)
"""What SGLang 0.5.17 prints; a batch that is printed later ends nothing."""


@pytest.mark.parametrize(
    ("num_lines", "pieces"),
    [
        (8, ["imports of the server", "imports of the scheduler", "weights and cache", "graphs", "server"]),
        (4, ["imports of the server", "imports of the scheduler", "weights and cache"]),
    ],
    ids=["all", "graphs_under_way"],
)
def test_the_start_of_an_engine_is_divided_by_what_it_prints(num_lines: int, pieces: list[str], tmp_path: Path) -> None:
    (tmp_path / "engines").mkdir()
    log = EngineLog(tmp_path / "engines" / "engine_0.log")
    source = tmp_path / "printed"
    source.write_text("".join(f"[2026-11-17 22:30:37] {line}\n" for line in ENGINE_LINES[:num_lines]))
    log.follow(source.open("rb"))
    log.finish()
    log.note_start()
    assert [piece.what for piece in read_pieces(tmp_path, since=LONG_AGO)] == [*pieces, "first tokens"]
