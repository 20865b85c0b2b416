"""Episodes of the benchmark on a real engine."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from bench import one_engine
from bench.figures import Figure
from bench.turns import LOADS, measure_turns
from megarl.families import PUBLIC_MODELS
from megarl.tools.quickstart.tiny_model import TinyShape


@pytest.mark.slow
@pytest.mark.usefixtures("real_engines")
def test_the_same_tokens_are_generated_in_turns_and_in_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny = TinyShape(vocab=2000, max_context_tokens=1024).as_model()
    monkeypatch.setattr(one_engine, "PUBLIC_MODELS", {**PUBLIC_MODELS, "tiny": tiny})

    async def measure() -> list[Figure | dict[str, object]]:
        return [outcome async for outcome in measure_turns("tiny", tmp_path, {}, device="cpu")]

    (figure,) = asyncio.run(measure())
    assert isinstance(figure, Figure)
    in_turns, whole = (float(text.rpartition(", ")[2].removesuffix(" s")) for text in (figure.name, figure.against))
    assert figure.value == pytest.approx(sum(map(sum, LOADS["cpu"].episodes())) / in_turns, rel=0.01)
    assert figure.ratio == pytest.approx(whole / in_turns, rel=0.01)
