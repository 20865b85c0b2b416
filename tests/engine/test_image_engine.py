"""Images in a real engine: what it samples is what the trainer's model says of the same pixels."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch

from megarl.data.images import ImageStore
from megarl.errors import MegarlError
from megarl.families.qwen2_5_vl import vision_of
from megarl.train.rank_spec import ImageFiles
from megarl.types import ImagePlace, Prompt, RolloutGroup
from tests.engine.engines import ServedModel, generator_of, serve
from tests.tiny_models import TOWERS
from tests.train.reference import Model, Reference
from tests.train.splits import DESCENT, GRPO

pytestmark = pytest.mark.usefixtures("real_engines")


@pytest.fixture(
    scope="module", params=[TOWERS[0], *(pytest.param(family, marks=pytest.mark.slow) for family in TOWERS[1:])]
)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedModel]:
    served = serve(tmp_path_factory.mktemp(request.param), request.param, tensor=1, tied=False)
    yield served
    served.process.stop()


def store_of(served: ServedModel) -> ImageStore:
    return ImageStore(served.folder.parent / "images")


def prompt_of(served: ServedModel, uid: str, sizes: list[tuple[int, int]]) -> Prompt:
    vision, random = vision_of(served.shape), np.random.default_rng(len(uid))
    ids, images = [5, 6], list[ImagePlace]()
    for rows, columns in sizes:
        step = vision.token_pixels
        pixels = random.integers(0, 256, (rows * step, columns * step, 3), dtype=np.uint8)
        digest = store_of(served).put(pixels)
        images.append(ImagePlace(digest=digest, start=len(ids) + 1, num_rows=rows, num_columns=columns))
        ids += [vision.start_token, *[vision.image_token] * (rows * columns), vision.end_token, 7]
    return Prompt(
        uid=uid,
        position=0,
        epoch=0,
        token_ids=np.array(ids, np.int32),
        data_source="",
        ground_truth="",
        extra_info={},
        images=tuple(images),
    )


async def generated(served: ServedModel, prompts: list[Prompt]) -> list[RolloutGroup]:
    async with served.fleet() as fleet:
        generator = generator_of(fleet, num_rollouts=3, max_attempts=1)
        return list(await asyncio.gather(*(generator.generate(prompt) for prompt in prompts)))


def test_log_probabilities_are_those_of_the_trainers_model(served: ServedModel) -> None:
    from megarl.types import TrainSample

    prompts = [
        prompt_of(served, "one", [(2, 3)]),
        prompt_of(served, "three", [(1, 2), (4, 1), (2, 2)]),
        prompt_of(served, "text", []),
    ]
    groups = asyncio.run(generated(served, prompts))
    reference = Reference(Model(folder=served.folder, shape=served.shape), DESCENT, GRPO, 1.0)
    reference.images = ImageFiles(model=served.folder, store=store_of(served).folder)
    samples = [
        TrainSample(
            prompt_ids=group.prompt.token_ids, images=group.prompt.images, rollout=each, advantages=each.logprobs
        )
        for group in groups
        for each in group.rollouts
    ]
    for sample, expected in zip(samples, reference.logprobs(samples), strict=True):
        torch.testing.assert_close(torch.from_numpy(sample.rollout.logprobs), expected, rtol=0, atol=1e-5)


def test_two_prompts_that_differ_in_their_images_alone_do_not_share_a_prefix(served: ServedModel) -> None:
    one, other = prompt_of(served, "a", [(3, 3)]), prompt_of(served, "bb", [(3, 3)])
    assert one.token_ids.tolist() == other.token_ids.tolist()
    first, second, again = asyncio.run(generated(served, [one, other, replace(one, uid="a")]))
    assert first.rollouts[0].logprobs[0] != second.rollouts[0].logprobs[0]
    assert first.rollouts[0].logprobs.tolist() == again.rollouts[0].logprobs.tolist()


def lost(served: ServedModel, prompt: Prompt) -> Prompt:
    store_of(served).path(prompt.images[0].digest).unlink()
    return prompt


def elsewhere(served: ServedModel, prompt: Prompt) -> Prompt:
    return replace(prompt, images=(replace(prompt.images[0], start=1),))


def larger(served: ServedModel, prompt: Prompt) -> Prompt:
    return replace(prompt, images=(replace(prompt.images[0], num_rows=1, num_columns=2),))


@pytest.mark.parametrize(
    ("change", "message"),
    [(lost, "cannot be read"), (elsewhere, "are not those of an image"), (larger, "an image of 2 x 1 tokens")],
)
def test_an_image_that_is_not_as_it_was_sent_is_an_error_of_its_row(
    change: object, message: str, served: ServedModel
) -> None:
    assert callable(change)
    prompt = change(served, prompt_of(served, f"rows.parquet:{message[-3:]}", [(2, 1)]))
    with pytest.raises(MegarlError, match=f"prompt rows.parquet:.*{message}"):
        asyncio.run(generated(served, [prompt]))
    asyncio.run(generated(served, [prompt_of(served, "still there", [(1, 1)])]))
