"""Rows with images: what of a file becomes tokens and places, and which rows are refused."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from megarl.config.recipe import DataConfig
from megarl.data.image_places import places_in_space
from megarl.data.images import ImageReader, ImageStore
from megarl.data.packing import Packing
from megarl.data.prompts import PromptReader, PromptSet
from megarl.data.tokenizer import Tokenizer, load_tokenizer
from megarl.errors import DataError
from megarl.families import PUBLIC_MODELS
from megarl.families.qwen2_5_vl import vision_of
from megarl.types import ImagePlace
from tests.data.test_images import FIELDS
from tests.episodes.templates import write_tokenizer
from tests.filled_shares import pack
from tests.train.samples import make_samples

TEMPLATE = (
    "{% for m in messages %}[{{ m['role'] }}]{% if m['content'] is string %}{{ m['content'] }}{% else %}"
    "{% for p in m['content'] %}{% if p['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% else %}{{ p['text'] }}{% endif %}{% endfor %}{% endif %}{% endfor %}[assistant]"
)
MARKS = ("<|vision_start|>", "<|image_pad|>", "<|vision_end|>")
Write = Callable[..., Path]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("seeing")
    vocab = write_tokenizer(folder, "qwen2.5", template=TEMPLATE, added=MARKS)
    (folder / "preprocessor_config.json").write_text(json.dumps({**FIELDS, "min_pixels": 28 * 28}))
    return load_tokenizer(folder, vocab=vocab)


def png(height: int, width: int, colour: int = 90) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(np.full((height, width, 3), colour, np.uint8)).save(buffer, "PNG")
    return buffer.getvalue()


def read(tokenizer: Tokenizer, path: Path, *, store: Path | None = None, **fields: object) -> PromptSet:
    config = DataConfig.model_validate({"train": [path], "ground_truth_key": None, **fields})
    (image_token,) = tokenizer.encode(["<|image_pad|>"])[0].tolist()
    vision = replace(vision_of(PUBLIC_MODELS["qwen2.5-vl-3b"]), image_token=image_token)
    images = ImageReader(model=tokenizer.folder, vision=vision, store=store, max_pixels=config.max_image_pixels)
    return PromptReader(config=config, kind="prompts", images=images).read([path], tokenizer)


def user(content: object) -> list[dict[str, object]]:
    return [{"role": "user", "content": content}]


def test_an_image_has_as_many_tokens_as_it_has_and_is_kept_once(
    tokenizer: Tokenizer, write_parquet: Write, tmp_path: Path
) -> None:
    marked = {"prompt": user("<image>Which?<image>"), "images": [png(56, 84), png(28, 28)]}
    path = write_parquet(marked, {"prompt": user("text"), "images": None}, marked)
    read_set = read(tokenizer, path, store=tmp_path / "store")
    first, text, again = read_set.prompts
    assert tokenizer.decode(first.token_ids) == (
        "[user]<|vision_start|>" + "<|image_pad|>" * 6 + "<|vision_end|>Which?"
        "<|vision_start|><|image_pad|><|vision_end|>[assistant]"
    )
    pad = tokenizer.encode(["<|image_pad|>"])[0][0]
    for image in first.images:
        assert set(first.token_ids[image.start : image.end].tolist()) == {pad}
    assert [(image.num_rows, image.num_columns) for image in first.images] == [(2, 3), (1, 1)]
    assert text.images == ()
    assert again.images == first.images
    store = ImageStore(tmp_path / "store")
    assert [store.read(image.digest).shape for image in first.images] == [(56, 84, 3), (28, 28, 3)]
    assert len(list(store.folder.iterdir())) == 2


@pytest.mark.parametrize("form", ["bytes", "path", "struct of bytes", "struct of a path"])
def test_images_come_as_bytes_or_paths(form: str, tokenizer: Tokenizer, write_parquet: Write, tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(png(28, 56))
    value: object = {
        "bytes": png(28, 56),
        "path": "a.png",
        "struct of bytes": {"bytes": png(28, 56), "path": "elsewhere.png"},
        "struct of a path": {"bytes": None, "path": str(tmp_path / "a.png")},
    }[form]
    (prompt,) = read(tokenizer, write_parquet({"prompt": user("<image>"), "images": [value]})).prompts
    assert [(image.num_rows, image.num_columns) for image in prompt.images] == [(1, 2)]


def test_content_may_be_parts(tokenizer: Tokenizer, write_parquet: Write) -> None:
    parts = [{"type": "text", "text": "Look: "}, {"type": "image", "text": None}]
    (prompt,) = read(tokenizer, write_parquet({"prompt": user(parts), "images": [png(28, 28)]})).prompts
    assert tokenizer.decode(prompt.token_ids) == ("[user]Look: <|vision_start|><|image_pad|><|vision_end|>[assistant]")


def test_a_recipe_limits_the_size_and_the_length(tokenizer: Tokenizer, write_parquet: Write) -> None:
    path = write_parquet({"prompt": user("<image>"), "images": [png(224, 224)]})
    (prompt,) = read(tokenizer, path, max_image_pixels=56 * 56).prompts
    assert prompt.images[0].num_tokens == 4
    with pytest.raises(DataError, match=r"longer than data.max_prompt_tokens 40 .*with 82 tokens"):
        read(tokenizer, path, max_prompt_tokens=40)


@pytest.mark.parametrize(
    ("images", "content", "message"),
    [
        ([b"no image"], "<image>", "row 1, column images: image 0: not a readable image"),
        ([png(28, 28), png(28, 28)[:40]], "<image><image>", "row 1, column images: image 1: not a readable"),
        (["missing.png"], "<image>", "image 0: .*missing.png: No such file"),
        ([png(28, 28)], "none", "row 1, column images: 1 images, and 0 places for them"),
        ([], "<image><|image_pad|>", "0 images, and 1 places"),
        ([""], "<image>", "image 0 has neither bytes nor a path"),
    ],
)
def test_a_bad_image_is_an_error_of_its_row(
    images: list[object], content: str, message: str, tokenizer: Tokenizer, write_parquet: Write, tmp_path: Path
) -> None:
    kind = type(images[0]) if images else bytes
    good = png(28, 28)
    if kind is str:
        (tmp_path / "good.png").write_bytes(good)
    fine = {"prompt": user("<image>"), "images": ["good.png" if kind is str else good]}
    with pytest.raises(DataError, match=message):
        read(tokenizer, write_parquet(fine, {"prompt": user(content), "images": images}))


def test_a_model_without_eyes_refuses_images_unless_they_are_ignored(
    tokenizer: Tokenizer, write_parquet: Write
) -> None:
    path = write_parquet({"prompt": user("<image>what?"), "images": [png(28, 28)]})
    config = DataConfig.model_validate({"train": [path], "ground_truth_key": None})
    with pytest.raises(
        DataError, match=r"row 0, column images: 1 images, and the model sees none; set data.images_key"
    ):
        PromptReader(config=config, kind="prompts").read([path], tokenizer)
    ignoring = config.model_copy(update={"images_key": None})
    assert PromptReader(config=ignoring, kind="prompts").read([path], tokenizer).prompts[0].images == ()


@pytest.mark.parametrize("other", ["a", "b"])
def test_prompts_are_computed_once_where_their_images_are_equal_too(other: str) -> None:
    samples = [
        replace(
            make_samples(1, vocab=9)[0],
            prompt_ids=np.arange(8, dtype=np.int32),
            images=(ImagePlace(digest=digest, start=2, num_rows=2, num_columns=1),),
        )
        for digest in ("a", other)
    ]
    packing = Packing(
        data_parallel=1, tokens_per_micro_batch=64, pad_multiple=1, micro_batch_multiple=1, samples_per_update=None
    )
    (batch,) = pack(samples, packing, temperature=1.0, shares_prefixes=True)
    (micro_batch,) = batch.mini_batches[0].micro_batches
    length = int(micro_batch.sequence_starts[1])
    assert [(image.digest, image.start) for image in micro_batch.images] == [("a", 2), (other, length + 2)]
    computed = len(micro_batch.token_ids) if micro_batch.shared is None else len(micro_batch.shared.computed)
    assert computed == (2 * length - 8 if other == "a" else 2 * length)
    # Two rows and one column of tokens take the time of two, as they are two; the next text is where it would be.
    places = places_in_space(micro_batch.positions, micro_batch.sequence_starts, micro_batch.images)
    assert places[:, 2:5].tolist() == [[2, 2, 4], [2, 3, 4], [2, 2, 4]]
