"""Rows with images and rows of text in one batch: log-probabilities and one update, against transformers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from megarl.data.images import ImageStore
from megarl.families.shape import ModelShape
from megarl.train.rank_spec import ImageFiles
from megarl.types import ImagePlace, TrainSample
from tests.schedule import slow
from tests.tiny_models import TOWERS
from tests.train import jobs
from tests.train.cluster import Cluster, assembled
from tests.train.conftest import Models
from tests.train.reference import Reference
from tests.train.samples import make_samples
from tests.train.splits import (
    CONTEXT_SPLITS,
    DESCENT,
    GRPO,
    SPLITS,
    TEMPERATURE,
    TOLERANCE,
    assert_close,
    assert_same_logprobs,
    packed,
    setup_of,
    whole_weights,
)

LIGHT = (("qwen2_5_vl", "TP2-SP"), ("qwen3_vl", "PP2-VPP2"))
SLOW = [
    (family, split)
    for family in TOWERS
    for split in ("TP1", "TP2", "TP2-SP", "PP2", "PP2-VPP2", "TP2-PP2", "DP2", "CP2", "CP2-TP2-SP")
    if (family, split) not in LIGHT
]
SIZES = ((28, 28), (56, 84), (112, 28), (56, 56))


def with_images(samples: Sequence[TrainSample], shape: ModelShape, store: ImageStore) -> list[TrainSample]:
    """Return the samples, each but the third with images in its prompt; the first two have the same one."""
    vision = shape.vision
    assert vision is not None
    random = np.random.default_rng(5)
    pixels = [random.integers(0, 256, (*size, 3), dtype=np.uint8) for size in SIZES]
    seen = []
    for index, sample in enumerate(samples):
        chosen = {0: [1], 1: [1], 2: []}.get(index, [index % 4, (index + 1) % 4])
        ids, images = [*sample.prompt_ids.tolist()], list[ImagePlace]()
        for each in chosen:
            rows, columns = (side // vision.token_pixels for side in SIZES[each])
            start = len(ids) + 1
            ids += [vision.start_token, *[vision.image_token] * (rows * columns), vision.end_token]
            images.append(ImagePlace(digest=store.put(pixels[each]), start=start, num_rows=rows, num_columns=columns))
        prompt_ids = np.array([*ids, 7], np.int32)
        seen.append(replace(sample, prompt_ids=prompt_ids, images=tuple(images)))
    return seen


@pytest.mark.parametrize(("family", "split"), [*LIGHT, *slow(*SLOW)])
def test_an_update_with_images_is_that_of_transformers(
    family: str, split: str, cluster: Cluster, models: Models, tmp_path: Path
) -> None:
    model = models.get(family, tied=False)
    files = ImageFiles(model=model.folder, store=tmp_path / "images")
    samples = with_images(make_samples(6, vocab=model.shape.vocab - 4), model.shape, ImageStore(files.store))
    reference = Reference(model, DESCENT, GRPO, TEMPERATURE)
    reference.images = files
    old = reference.logprobs(samples)
    loss, _, grad_norm = reference.update(samples, old)
    world, actor = {**SPLITS, **CONTEXT_SPLITS}[split]
    shares = split in ("TP1", "TP2-SP", "PP2")
    asked = packed(samples, world=world, actor=actor, budget=48, is_forward=True, shares_prefixes=shares)
    trained = packed(samples, world=world, actor=actor, budget=48, shares_prefixes=shares)
    setup = replace(setup_of(model, actor), images=files)
    outcomes = cluster.run(world, jobs.train, setup, [asked], trained)
    assert_same_logprobs(assembled(outcome.logprobs[0] for outcome in outcomes), old)
    assert_close(whole_weights(outcomes, model, actor), reference.weights())
    assert outcomes[0].stats.loss == pytest.approx(loss, abs=TOLERANCE)
    assert outcomes[0].stats.grad_norm == pytest.approx(grad_norm, rel=TOLERANCE, abs=TOLERANCE)
