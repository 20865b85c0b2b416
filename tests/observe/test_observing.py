from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from socket import AF_INET

import httpx
import psutil
import pytest

from megarl.config.recipe import Recipe
from megarl.errors import EngineError, PreemptedError, StoppedError
from megarl.observe.endpoint import TARGETS_FILE
from megarl.observe.event_file import read_events
from megarl.observe.events import CheckpointFailed, Record, RunFinished, RunStarted, RunStatus, Warned
from megarl.observe.observing import observing
from tests.observe.samples import (
    ListSink,
    checkpoint_saved,
    engine_changed,
    evaluated,
    make_recipe,
    published,
    step_summary,
)
from tests.small_disk import filled, small_disk


def test_file_endpoint_and_display_are_told_the_same(tmp_path: Path) -> None:
    display, recipe = ListSink(), make_recipe(tmp_path)
    with observing(recipe, display=display) as observer:
        with observer.phase("generate"):
            pass
        observer.emit(published(1))
        observer.step_summarized(step_summary(1))
        observer.emit(evaluated(1, 0.5))
        observer.emit(checkpoint_saved(1))
        observer.emit(CheckpointFailed(step=2, reason="no room"))
        observer.warned("careful")
        (started,) = (event for event in display.events if isinstance(event, RunStarted))
        assert started.metrics_url is not None
        assert 'megarl_step{run="sample"} 1.0' in httpx.get(started.metrics_url, timeout=60).text
    assert [event.kind for event in display.events] == [
        "run_started",
        "phase_started",
        "phase_ended",
        "published",
        "step_finished",
        "evaluated",
        "checkpoint_saved",
        "checkpoint_failed",
        "warned",
        "run_finished",
    ]
    assert list(read_events(tmp_path / "sample" / "events.jsonl")) == display.records
    assert [record.sequence for record in display.records] == list(range(10))
    assert display.is_closed
    assert Recipe.model_validate(started.recipe) == recipe
    assert httpx.URL(started.metrics_url).port not in [port for _, port in listening()]


def test_the_endpoint_is_where_the_network_of_the_recipe_is(tmp_path: Path) -> None:
    own = [entry.address for entries in psutil.net_if_addrs().values() for entry in entries if entry.family == AF_INET]
    address = next((each for each in own if not each.startswith("127.")), own[0])
    fields = make_recipe(tmp_path).model_dump()
    recipe = Recipe.model_validate({**fields, "network": {"bind": f"{address}/32"}})
    display = ListSink()
    with observing(recipe, display=display):
        (started,) = (event for event in display.events if isinstance(event, RunStarted))
        assert started.metrics_url is not None
        url = httpx.URL(started.metrics_url)
        assert url.host == address
        assert "megarl_step" in httpx.get(url, timeout=60).text
        # Prometheus is told the same address.
        assert f"{address}:{url.port}" in (recipe.run_folder / "prometheus_targets.json").read_text()
        # Another process may have the same port on another address, so this process is asked what it has open.
        assert {host for host, port in listening() if port == url.port} == {address}


def listening() -> list[tuple[str, int]]:
    found = psutil.Process().net_connections(kind="tcp4")
    return [(each.laddr.ip, each.laddr.port) for each in found if each.status == psutil.CONN_LISTEN]


def test_a_null_port_opens_no_endpoint(tmp_path: Path) -> None:
    recipe = make_recipe(tmp_path).model_dump()
    recipe["observe"]["metrics_port"] = None
    display = ListSink()
    with observing(Recipe.model_validate(recipe), display=display):
        pass
    assert isinstance(display.events[0], RunStarted)
    assert display.events[0].metrics_url is None


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (EngineError("engine 0 died"), RunStatus.FAILED),
        (PreemptedError("asked to stop"), RunStatus.PREEMPTED),
        (StoppedError("stopped by Ctrl-C"), RunStatus.INTERRUPTED),
        (KeyboardInterrupt(), RunStatus.INTERRUPTED),
        (asyncio.CancelledError(), RunStatus.INTERRUPTED),
    ],
)
def test_a_run_that_fails_says_so_in_its_last_event(error: BaseException, status: RunStatus, tmp_path: Path) -> None:
    display = ListSink()
    with pytest.raises(type(error)), observing(make_recipe(tmp_path), display=display):
        raise error
    last = display.events[-1]
    assert isinstance(last, RunFinished)
    assert last.status is status
    assert last.reason == (str(error) or type(error).__name__)
    assert display.is_closed


def test_the_run_may_say_itself_how_it_ended(tmp_path: Path) -> None:
    display = ListSink()
    with observing(make_recipe(tmp_path), display=display) as observer:
        observer.run_finished(RunStatus.DONE)
    assert [event.kind for event in display.events] == ["run_started", "run_finished"]


def test_what_is_logged_during_a_run_is_kept(tmp_path: Path) -> None:
    logger = logging.getLogger("megarl.weights")
    with observing(make_recipe(tmp_path), display=ListSink()):
        logger.info("published version=%d", 3)
    logger.info("after the run")
    (line,) = (tmp_path / "sample" / "megarl.log").read_text().splitlines()
    assert line.endswith("INFO megarl.weights published version=3")


@pytest.mark.needs("root")
@pytest.mark.fault(
    "a disk of the run folder that is really full for a while", "told once; the run goes on; no event is lost"
)
def test_a_full_disk_ends_no_run_and_loses_no_event(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    display = ListSink()
    with small_disk(tmp_path / "disk", num_bytes=1 << 20) as disk:
        with observing(make_recipe(disk), display=display) as observer:
            with filled(disk):
                for step in (1, 2):
                    with observer.phase("generate"):
                        logging.getLogger("megarl.test").warning("a line that finds no room " * 300)
                    observer.emit(engine_changed(0, version=step))
                    observer.step_summarized(step_summary(step))
            observer.emit(published(3))
            started = display.events[0]
            assert isinstance(started, RunStarted)
            page = httpx.get(str(started.metrics_url), trust_env=False).text
            targets = (disk / "sample" / TARGETS_FILE).read_text()
        assert list(read_events(disk / "sample" / "events.jsonl")) == display.records
    texts = [event.text for event in display.events if isinstance(event, Warned)]
    assert sorted(text.partition(" (")[0] for text in texts if "write" in text) == [
        "EventLog cannot write",
        "EventLog writes again",
        "Targets cannot write",
        "Targets writes again",
    ]
    assert 'megarl_sink_failures_total{run="sample",sink="EventLog"}' in page
    assert "127.0.0.1:30000" in targets, "written once there was room"
    assert capsys.readouterr().err.count("megarl.log cannot be written") == 1


def test_a_display_that_fails_ends_no_run(tmp_path: Path) -> None:
    class Gone(ListSink):
        def record(self, record: Record) -> None:
            super().record(record)
            raise BrokenPipeError(32, "Broken pipe")

        def close(self) -> None:
            raise BrokenPipeError(32, "Broken pipe")

    with observing(make_recipe(tmp_path), display=Gone()) as observer:
        observer.step_summarized(step_summary(1))
    kinds = [record.event.kind for record in read_events(tmp_path / "sample" / "events.jsonl")]
    assert kinds == ["run_started", "warned", "step_finished", "run_finished"]


def test_a_damaged_line_of_an_earlier_process_is_told_and_stops_nothing(tmp_path: Path) -> None:
    with observing(make_recipe(tmp_path), display=ListSink()) as observer:
        observer.step_summarized(step_summary(1))
    path = tmp_path / "sample" / "events.jsonl"
    path.write_bytes(b"\0" * 300 + b"\n" + path.read_bytes())
    display = ListSink()
    with observing(make_recipe(tmp_path), display=display, resumed_step=1, is_continued=True):
        pass
    warned = [event.text for event in display.events if isinstance(event, Warned)]
    assert len(warned) == 1
    assert "1 damaged lines are left out; the first is line 1" in warned[0]


def test_only_a_run_that_took_a_step_is_moved_and_the_next_one_has_its_images(tmp_path: Path) -> None:
    recipe = make_recipe(tmp_path)
    # Prompts are read, and their images kept, before it is known whether there is an earlier run.
    recipe.images_folder.mkdir(parents=True)
    (recipe.images_folder / "a.png").write_bytes(b"of both runs")
    for _ in range(2):
        with pytest.raises(EngineError), observing(recipe, display=ListSink()):
            raise EngineError("did not start")
    assert [path.name for path in tmp_path.iterdir() if not path.name.startswith(".")] == ["sample"]
    with observing(recipe, display=ListSink()) as observer:
        observer.step_summarized(step_summary(1))
    display = ListSink()
    with observing(recipe, display=display):
        pass
    assert {path.name for path in tmp_path.iterdir() if not path.name.startswith(".")} == {"sample", "sample.1"}
    (one, other) = (tmp_path / name / "images" / "a.png" for name in ("sample", "sample.1"))
    assert one.read_bytes() == other.read_bytes() == b"of both runs"
    assert any("moved to" in event.text for event in display.events if isinstance(event, Warned))
