"""Times of a large run's page in a real browser."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

from bench.browser import Page, open_browser
from megarl.data.rollout_files import ROLLOUTS_FOLDER, list_rollouts, rollouts_file
from megarl.data.rollout_reading import read_list
from megarl.errors import DataError
from megarl.observe.event_file import EVENTS_FILE
from megarl.tools.page.web_page import PageServer

_NUM_JUMPS = 40

_PAINTED = "performance.getEntriesByName('first-contentful-paint')[0]?.startTime"
_LISTED = "document.querySelectorAll('.item .line').length > 3 && performance.now()"
_JUMP = """
new Promise((done) => {
  const list = document.querySelector('.list');
  const began = performance.now();
  list.scrollTop = SHARE * list.scrollHeight;
  const look = () => {
    const item = document.querySelectorAll('.item .line')[0];
    item ? done(performance.now() - began) : requestAnimationFrame(look);
  };
  requestAnimationFrame(() => requestAnimationFrame(look));
})
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class PageFigures:
    num_rollouts: int
    first_paint_s: float
    list_s: float
    """Time from opening the page to the first rollouts."""
    jump_s: float
    """Time from a long scroll to the rollouts there; the slowest of several."""
    num_elements: int
    """Elements of the list, which shows a window of its rows."""


async def measure_page(run: Path, *, num_rollouts: int) -> PageFigures:
    """Measure the page with the rollouts that a run kept, repeated until there are enough."""
    with tempfile.TemporaryDirectory(prefix="megarl-bench-") as name:
        folder = Path(name) / run.name
        count = await asyncio.to_thread(_enlarge, run, folder, num_rollouts)
        server = PageServer(folder, port=0)
        await server.start()
        try:
            async with open_browser() as page:
                return await _measure(page, f"{server.url}#rollouts", count)
        finally:
            await server.close()


def _enlarge(run: Path, folder: Path, num_rollouts: int) -> int:
    files = list(list_rollouts(run).values())
    if not files:
        raise DataError(f"{run}: has no kept rollouts; name a run with a {ROLLOUTS_FOLDER} folder")
    (folder / ROLLOUTS_FOLDER).mkdir(parents=True)
    shutil.copyfile(run / EVENTS_FILE, folder / EVENTS_FILE)
    count = step = 0
    while count < num_rollouts:
        source = files[step % len(files)]
        step += 1
        shutil.copyfile(source, rollouts_file(folder, step))
        count += len(read_list(source))
    return count


async def _measure(page: Page, url: str, num_rollouts: int) -> PageFigures:
    await page.open(url)
    list_ms = await page.until(_LISTED)
    paint_ms = await page.until(_PAINTED)
    jumps = [
        await page.evaluate(_JUMP.replace("SHARE", str((jump * 7 % _NUM_JUMPS) / _NUM_JUMPS)))
        for jump in range(_NUM_JUMPS)
    ]
    return PageFigures(
        num_rollouts=num_rollouts,
        first_paint_s=paint_ms / 1000,
        list_s=list_ms / 1000,
        jump_s=max(jumps) / 1000,
        num_elements=await page.evaluate("document.querySelectorAll('.list *').length"),
    )
