"""A real engine of a mixture returns the experts of every token: of a response, of turns, of what was interrupted."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from megarl.engine import admin
from megarl.engine.fleet import Fleet
from megarl.engine.process import EngineProcess
from megarl.episodes.session import Session
from megarl.rollout.generator import FleetGenerator
from megarl.rollout.task import Sampling, Vocabulary
from megarl.tokens import SampledTokens
from megarl.types import Ending, Prompt, Rollout, TokenArray
from tests.engine.engines import CONTEXT, ServedModel, engine_spec, prompt_of, spell
from tests.tiny_models import write_tiny_model

PROMPT = (50, 57, 63, 90, 88, 41, 17)
ENDS = tuple(range(2, 22))


@pytest.fixture(scope="module")
def mixture(real_engines: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedModel]:
    with recording_engine(tmp_path_factory.mktemp("mixture"), "qwen3_moe") as served:
        yield served


@contextmanager
def recording_engine(folder: Path, family: str) -> Iterator[ServedModel]:
    shape = write_tiny_model(folder / "model", family, layers=3, seed=1)
    process = EngineProcess(replace(engine_spec(folder / "model", folder / "run"), returns_routes=True))
    process.start()
    try:
        asyncio.run(process.wait_ready())
        yield ServedModel(process=process, folder=folder / "model", other_folder=folder / "model", shape=shape)
    finally:
        process.stop()


def generator_of(fleet: Fleet, served: ServedModel, *, num_tokens: int = 24) -> FleetGenerator:
    sampling = Sampling(num_rollouts=4, temperature=1.0, top_p=1.0, top_k=None, max_response_tokens=num_tokens)
    vocabulary = Vocabulary(size=99, eos_ids=ENDS, max_context_tokens=CONTEXT, decode=spell, routes=served.shape.routes)
    return FleetGenerator(
        fleet, sampling=sampling, vocabulary=vocabulary, seed=7, max_attempts=3, in_flight="abort", has_routes=True
    )


def expected_routes(folder: Path, token_ids: list[int]) -> np.ndarray:
    """Return the experts that the Hugging Face model chooses, sorted. [tokens, layers, experts of a token]"""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    chosen: list[torch.Tensor] = []
    for layer in model.model.layers:
        if hasattr(layer.mlp, "route_tokens_to_experts"):  # sigmoid routers choose outside of their gate
            layer.mlp.route_tokens_to_experts = recorded(layer.mlp.route_tokens_to_experts, chosen)
        elif hasattr(layer.mlp, "gate"):
            layer.mlp.gate.register_forward_hook(lambda _gate, _inputs, output: chosen.append(output[2]))
    with torch.no_grad():
        model(torch.tensor([token_ids]))
    return torch.stack(chosen, dim=1).sort(dim=-1).values.numpy()


def recorded(route: Callable[..., tuple[torch.Tensor, ...]], chosen: list[torch.Tensor]) -> Callable[..., object]:
    def call(*arguments: torch.Tensor) -> tuple[torch.Tensor, ...]:
        output = route(*arguments)
        chosen.append(output[0])
        return output

    return call


def check_routes(served: ServedModel, prompt: tuple[int, ...], rollout: Rollout) -> None:
    routes = rollout.content.load().routes
    assert routes is not None
    assert routes.dtype == np.uint8
    tokens = [*prompt, *rollout.token_ids.tolist()]
    assert served.shape.routes is not None
    mixtures = [layer for layer in range(served.shape.num_layers) if layer not in served.shape.routes.dense_layers]
    np.testing.assert_array_equal(np.sort(routes)[:, mixtures], expected_routes(served.folder, tokens[:-1]))


async def test_a_response_has_the_experts_of_its_prompt_and_of_its_tokens(mixture: ServedModel) -> None:
    async with mixture.fleet() as fleet:
        rollouts = (await generator_of(fleet, mixture).generate(prompt_of(*PROMPT))).rollouts
    assert len({rollout.num_tokens for rollout in rollouts}) > 1
    assert len({rollout.prompt_routes for rollout in rollouts}) == 1
    for rollout in rollouts:
        check_routes(mixture, PROMPT, rollout)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["mixtral", "glm4_moe"])
@pytest.mark.usefixtures("real_engines")
def test_an_engine_of_another_family_says_which_experts_its_layers_choose(family: str, tmp_path: Path) -> None:
    with recording_engine(tmp_path, family) as served:
        asyncio.run(test_a_response_has_the_experts_of_its_prompt_and_of_its_tokens(served))


async def test_a_turn_brings_the_experts_of_new_tokens_only(mixture: ServedModel) -> None:
    asked: list[tuple[int, int]] = []

    class Turns:
        def __init__(self, generator: FleetGenerator, prompt: Prompt) -> None:
            self.generator, self.prompt = generator, prompt

        async def sample(
            self, history: TokenArray, *, max_tokens: int, row: int, num_routed: int, heard: object = None
        ) -> SampledTokens:
            sampled = await self.generator.turns(self.prompt, 0).sample(
                history, max_tokens=6, row=row, num_routed=num_routed
            )
            assert sampled.routes is not None
            asked.append((num_routed, len(sampled.routes)))
            assert num_routed + len(sampled.routes) == len(history) + len(sampled.token_ids) - 1
            return sampled

    async with mixture.fleet() as fleet:
        prompt = prompt_of(*PROMPT)
        session = Session(
            Turns(generator_of(fleet, mixture), prompt), prompt.token_ids, max_tokens=99, max_turns=9, decode=spell
        )
        await session.sample()
        session.append(np.array([30, 31, 32], np.int32))
        await session.sample()
        session.begin_row(np.array([60, 61, 62, 63], np.int32))
        await session.sample()
        session.append(np.array([33], np.int32))
        await session.sample()
        rollout = session.finish(Ending.ANSWERED, None)
    assert [first == 0 for first, _ in asked] == [True, False, True, False]
    (row,) = rollout.episode.rows
    routes, tokens = rollout.content.load().routes, rollout.token_ids.tolist()
    assert routes is not None
    assert len(routes) == len(PROMPT) + len(tokens) - 1
    first, second = routes[: len(PROMPT) + row], routes[len(PROMPT) + row :]
    assert (first[-1] == 255).all(), "the last token of a row is computed by nobody"
    np.testing.assert_array_equal(np.sort(first[:-1]), expected_routes(mixture.folder, [*PROMPT, *tokens[: row - 1]]))
    np.testing.assert_array_equal(np.sort(second), expected_routes(mixture.folder, tokens[row:-1]))


async def test_an_interrupted_response_has_the_experts_of_all_its_parts(mixture: ServedModel) -> None:
    async with mixture.fleet() as fleet:
        (engine,) = fleet.engines
        generator = generator_of(fleet, mixture, num_tokens=300)
        generator.vocabulary = replace(generator.vocabulary, eos_ids=(98,))
        task = asyncio.create_task(generator.generate(prompt_of(*PROMPT)))
        for _ in range(3):
            await asyncio.sleep(0.5)
            engine.num_pauses += 1
            await admin.pause(engine.client, admin.PauseMode.ABORT)
            await admin.resume(engine.client)
        rollout = max((await task).rollouts, key=lambda rollout: rollout.num_tokens)
    check_routes(mixture, PROMPT, rollout)
