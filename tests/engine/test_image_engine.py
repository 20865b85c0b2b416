"""Images in a real engine: what it samples is what the trainer's model says of the same pixels."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch

from megarl.config.roles import ActorConfig
from megarl.data.images import ImageStore
from megarl.data.packing import Packing
from megarl.data.shares import UNUSED_IN_FORWARD
from megarl.errors import MegarlError
from megarl.families.qwen2_5_vl import vision_of
from megarl.train.rank_spec import ImageFiles
from megarl.types import ImagePlace, Prompt, RolloutGroup, TrainSample
from tests.engine.engines import ServedModel, generator_of, serve
from tests.filled_shares import pack
from tests.tiny_models import TOWERS
from tests.train import jobs
from tests.train.cluster import Cluster, assembled
from tests.train.reference import Model, Reference
from tests.train.splits import DESCENT, GRPO, setup_of

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


def files_of(served: ServedModel) -> ImageFiles:
    return ImageFiles(model=served.folder, store=store_of(served).folder)


def samples_of(groups: list[RolloutGroup]) -> list[TrainSample]:
    return [
        TrainSample(
            prompt_ids=group.prompt.token_ids, images=group.prompt.images, rollout=each, advantages=each.logprobs
        )
        for group in groups
        for each in group.rollouts
    ]


def test_log_probabilities_are_those_of_the_trainers_model(served: ServedModel) -> None:
    prompts = [
        prompt_of(served, "one", [(2, 3)]),
        prompt_of(served, "three", [(1, 2), (4, 1), (2, 2)]),
        prompt_of(served, "text", []),
    ]
    groups = asyncio.run(generated(served, prompts))
    reference = Reference(Model(folder=served.folder, shape=served.shape), DESCENT, GRPO, 1.0)
    reference.images = files_of(served)
    samples = samples_of(groups)
    for sample, expected in zip(samples, reference.logprobs(samples), strict=True):
        torch.testing.assert_close(torch.from_numpy(sample.rollout.logprobs), expected, rtol=0, atol=1e-5)


def as_text(served: ServedModel, prompt: Prompt) -> Prompt:
    """Return a prompt of equal length whose tokens are all words."""
    first_image_token = served.shape.vocab - 4
    words = np.random.default_rng(len(prompt.uid)).integers(3, first_image_token, len(prompt.token_ids), dtype=np.int32)
    token_ids = np.where(prompt.token_ids < first_image_token, prompt.token_ids, words)
    return replace(prompt, uid=f"{prompt.uid} in words", token_ids=token_ids, images=())


def test_rows_with_images_differ_from_the_trainers_no_more_than_rows_of_text_of_their_lengths(
    served: ServedModel, cluster: Cluster
) -> None:
    sizes = [[(2, 3)], [(1, 2), (4, 1)], [(3, 3), (2, 2), (1, 4)], [(4, 4)]]
    seeing = [prompt_of(served, "x" * (1 + number), sizes[number % 4]) for number in range(24)]
    groups = asyncio.run(generated(served, [*seeing, *(as_text(served, prompt) for prompt in seeing)]))
    samples = samples_of(groups)
    packing = Packing(
        data_parallel=1, tokens_per_micro_batch=512, samples_per_update=None, pad_multiple=1, micro_batch_multiple=1
    )
    (batch,) = pack(samples, packing, temperature=1.0, without=UNUSED_IN_FORWARD)
    model = Model(folder=served.folder, shape=served.shape)
    setup = replace(setup_of(model, ActorConfig(pool="train")), images=files_of(served))
    trained = assembled(cluster.run(1, jobs.score, setup, batch))
    differences = [sample.rollout.logprobs - own for sample, own in zip(samples, trained, strict=True)]
    half = len(samples) // 2
    of_images, of_text = (
        np.sqrt(np.square(np.concatenate(d)).mean()) for d in (differences[:half], differences[half:])
    )
    # Some 850 tokens each, whose noise leaves about 0.05 of the ratio open.
    assert of_images < 1.25 * of_text < 1e-6


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
