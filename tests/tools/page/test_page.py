"""The page in a real browser: it draws, in light and dark, scrolls through very many rollouts, and obeys no model."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Literal

import pytest

from bench.browser import Page, open_browser
from megarl.tools.page.run_data import RunFolder
from megarl.tools.page.web_page import PageServer, report_page
from tests.tools.page.runs import ANSWER, CALL, GIVEN, HOSTILE, make_episodes, make_run, make_seen

pytestmark = pytest.mark.needs("chromium")


@asynccontextmanager
async def shown(folder: Path, *, view: str, width: int = 1280) -> AsyncIterator[Page]:
    server = PageServer(folder, port=0)
    await server.start()
    try:
        async with open_browser() as page:
            await page.open(f"{server.link}#{view}", width=width)
            await page.until("document.getElementById('name')?.textContent === 'sample'")
            yield page
            assert not page.complaints
    finally:
        await server.close()


async def test_curves_are_drawn_in_both_colours(tmp_path: Path) -> None:
    async with shown(make_run(tmp_path / "run"), view="curves") as page:
        num_cards = await page.until("document.querySelectorAll('.card svg path').length")
        assert num_cards >= 15
        schemes: tuple[Literal["light", "dark"], ...] = ("light", "dark")
        for colours in schemes:
            await page.show_in(colours)
            ground = await page.evaluate("getComputedStyle(document.body).backgroundColor")
            is_dark = sum(map(int, ground.removeprefix("rgb(").removesuffix(")").split(","))) < 3 * 64
            assert is_dark == (colours == "dark")
        await page.evaluate("document.getElementById('tab-timeline').click()")
        assert await page.until("document.querySelectorAll('rect.bar').length") >= 12
        assert await page.evaluate("location.hash") == "#timeline"
        # Seconds of a step: generate, pause, update, pause, publish, pause; producers waited for 0.5 of them.
        idle = await page.evaluate("[...document.querySelectorAll('text.idle')].map((one) => one.textContent)")
        assert idle[:2] == ["idle 8 %", "idle 67 %"]
        assert len(idle) == 8
        told = await page.evaluate("document.querySelector('p.idle').textContent")
        assert told == "Idle in these 4 steps: rollout 7 %, trainer 70 %"


async def test_a_link_to_a_view_shows_the_head_as_well(tmp_path: Path) -> None:
    async with shown(make_run(tmp_path / "run"), view="curves") as page:
        await page.until("document.querySelectorAll('.card svg path').length >= 15")
        # What a browser does with the fragment once the page is long enough to scroll.
        await page.evaluate("location.replace('#'); location.replace('#curves')")
        await page.until("location.hash === '#curves'")
        assert await page.evaluate("scrollY") == 0
        assert await page.evaluate("document.getElementById('name').getBoundingClientRect().top") > 0


async def test_nothing_is_wider_than_a_telephone(tmp_path: Path) -> None:
    async with shown(make_run(tmp_path / "run"), view="curves", width=390) as page:
        for view in ("curves", "timeline", "rollouts"):
            await page.evaluate(f"document.getElementById('tab-{view}').click()")
            await page.until(f"!document.getElementById('{view}').hidden")
            assert await page.evaluate("document.documentElement.scrollWidth <= innerWidth"), view


async def test_ten_thousand_rollouts_scroll_and_only_what_is_seen_exists(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", num_steps=4, rollouts_per_step=2500)
    async with shown(folder, view="rollouts") as page:
        await page.until("document.querySelector('#rollouts output').textContent === '10,000 rollouts'")
        await page.until("document.querySelectorAll('.item .line').length > 5")
        await page.evaluate("document.querySelector('.list').scrollTop = 1e9")
        # Newest first: the last line is of the first step.
        await page.until("document.querySelector('.item:last-child .meta')?.textContent.startsWith('step 1 ')")
        assert await page.evaluate("document.querySelectorAll('.item').length") < 60
        await page.evaluate(
            "const s = document.querySelector('input'); s.value = '3 77 w'; s.dispatchEvent(new Event('input'))"
        )
        await page.until("document.querySelector('#rollouts output').textContent === '1 rollouts'")


async def test_the_keyboard_chooses_and_what_a_model_wrote_is_only_text(tmp_path: Path) -> None:
    async with shown(make_run(tmp_path / "run", num_steps=1), view="rollouts") as page:
        await page.until("document.querySelectorAll('.item .line').length === 8")
        press = "document.querySelector('.list').dispatchEvent(new KeyboardEvent('keydown', {key: 'j'}))"
        await page.evaluate(press)
        text = await page.until("document.querySelector('.response')?.textContent")
        assert text == f"1 0 {HOSTILE}"
        assert await page.evaluate("document.querySelectorAll('.response img, .list img').length") == 0
        assert "owned" not in await page.evaluate("document.title")
        await page.evaluate(press)
        await page.until("document.querySelector('.detail h2').textContent === 'train.parquet:1, rollout 0'")
        # The gap of 0.1 is at the last token.
        assert await page.evaluate("document.querySelector('.response .token:last-child').className") == "token gap-2"


async def test_an_episode_is_a_conversation_and_its_step_has_a_swimlane(tmp_path: Path) -> None:
    async with shown(make_episodes(tmp_path / "run"), view="rollouts") as page:
        await page.until("document.querySelectorAll('.item .line').length === 12")
        await page.evaluate("document.querySelector('.item').click()")
        texts = await page.until("[...document.querySelectorAll('.detail .response')].map((one) => one.textContent)")
        assert texts == [CALL, GIVEN, ANSWER]
        assert await page.evaluate("document.querySelectorAll('.response .not-chosen').length") == len(GIVEN)
        heads = await page.evaluate("[...document.querySelectorAll('.detail .turn')].map((one) => one.textContent)")
        assert [head.split(" · ")[0] for head in heads] == ["model", "environment (not trained on)", "model"]
        assert "version 2 to 3" in heads[2]
        assert "reward 0.25" in heads[0]
        assert f"{len(CALL)} tokens, {len(CALL)} trained" in heads[0]
        await page.evaluate(
            "const colour = document.querySelector('.detail select'); colour.value = 'text'; "
            "colour.dispatchEvent(new Event('change'))"
        )
        said = await page.evaluate(
            "[...document.querySelectorAll('.detail .said .response')].map((one) => one.textContent)"
        )
        assert said == [CALL, GIVEN, ANSWER]
        assert await page.evaluate("document.querySelectorAll('.detail .token').length") == 0
        await page.evaluate("document.getElementById('tab-timeline').click()")
        # Three turns each, without the results that took no time.
        assert await page.until("document.querySelectorAll('rect.turn').length") == 3 * 12
        titles = await page.evaluate("[...document.querySelectorAll('#timeline h2')].map((one) => one.textContent)")
        assert "Episodes of step 1: 12" in titles


SIZES = "[...document.querySelectorAll('.images img')].map((one) => [one.naturalWidth, one.naturalHeight])"
SECOND = "document.querySelectorAll('.item')[1].click()"
MISSING = "document.querySelector('.images p')?.textContent"


async def see(page: Page) -> None:
    """Two images of the first prompt are drawn; of the second, one, and a line says what is missing."""
    await page.until("document.querySelectorAll('.item .line').length === 2")
    await page.evaluate("document.querySelector('.item').click()")
    await page.until("document.querySelectorAll('.images img').length === 2")
    await page.until("[...document.querySelectorAll('.images img')].every((one) => one.complete && one.naturalWidth)")
    assert await page.evaluate(SIZES) == [[96, 48], [64, 64]]
    assert await page.evaluate("document.querySelector('pre.prompt').textContent") == "1#+#="
    await page.evaluate(SECOND)
    assert await page.until(MISSING) == f"image 2 of 2 is not here: images/{'0' * 32}.png"
    assert await page.until(f"{SIZES}.length === 1 && {SIZES}[0][0] === 96")


async def test_images_of_prompts_are_shown_beside_answers(tmp_path: Path) -> None:
    folder = make_seen(tmp_path / "run")
    async with shown(folder, view="rollouts") as page:
        await see(page)
        # The browser says what it could not load.
        assert [complaint for complaint in page.complaints if "404" not in complaint] == []
        page.complaints.clear()
    path = tmp_path / "report.html"
    path.write_text(report_page(RunFolder(folder)))
    async with open_browser() as page:
        await page.open(f"{path.as_uri()}#rollouts")
        await see(page)
        assert not page.complaints


async def test_a_report_needs_no_server(tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    path.write_text(report_page(RunFolder(make_run(tmp_path / "run"))))
    async with open_browser() as page:
        await page.open(f"{path.as_uri()}#rollouts")
        await page.until("document.getElementById('name')?.textContent === 'sample'")
        await page.until("document.querySelector('#rollouts output').textContent === '32 rollouts'")
        await page.evaluate("document.getElementById('tab-curves').click()")
        assert await page.until("document.querySelectorAll('.card').length") >= 15
        assert not page.complaints
