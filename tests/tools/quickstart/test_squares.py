from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from transformers import AutoModelForImageTextToText

from megarl.config.algorithm import RowKind
from megarl.config.model import read_model_shape
from megarl.config.recipe import DataConfig
from megarl.data.images import ImageReader, Pixels, decode
from megarl.data.prompts import PromptReader, PromptSet
from megarl.data.tokenizer import load_tokenizer
from megarl.errors import DataError
from megarl.families.qwen2_5_vl import vision_of
from megarl.tools.quickstart.squares import CARELESS_PROBABILITY, SHAPE, SquaresFiles, make_squares

CELL = 28


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> SquaresFiles:
    return make_squares(tmp_path_factory.mktemp("squares"), num_train=300, num_sft=2000, num_eval=100, seed=3)


def drawn(path: Path) -> list[Pixels]:
    return [np.asarray(decode(images[0]["bytes"])) for images in pq.read_table(path)["images"].to_pylist()]


def counted(pixels: Pixels) -> tuple[int, int]:
    """Return the number of all squares and of the dark ones: the middle of a cell is within its square."""
    middles = pixels[CELL // 2 :: CELL, CELL // 2 :: CELL].mean(axis=-1)
    return int((middles < 255).sum()), int((middles < 120).sum())


def test_held_out_images_are_never_trained_on(files: SquaresFiles) -> None:
    held_out, *trained = (
        {image.tobytes() + bytes(image.shape[:2]) for image in drawn(path)}
        for path in (files.eval, files.train, files.sft)
    )
    assert len(held_out) == 100
    assert not held_out & (trained[0] | trained[1])


def test_the_teacher_counts_all_squares_or_overlooks_the_pale_ones(files: SquaresFiles) -> None:
    for path in (files.train, files.eval, files.sft):
        truths = [truth["ground_truth"] for truth in pq.read_table(path)["reward_model"].to_pylist()]
        assert truths == [str(counted(pixels)[0]) for pixels in drawn(path)]
    lessons = list(zip(map(counted, drawn(files.sft)), pq.read_table(files.sft)["response"].to_pylist(), strict=True))
    assert all(answer in map(str, counts) for counts, answer in lessons)
    with_pale = [answer == str(dark) for (num, dark), answer in lessons if num > dark]
    assert sum(with_pale) / len(with_pale) == pytest.approx(CARELESS_PROBABILITY, abs=0.04)
    # Imitating the likelier answer everywhere must stay below a half.
    without = [num == dark for num, dark in map(counted, drawn(files.eval))]
    assert sum(without) / len(without) < 0.4


def test_the_seed_decides_everything(tmp_path: Path) -> None:
    first, again, other = (
        make_squares(tmp_path / name, seed=seed, num_train=20, num_sft=20, num_eval=20)
        for name, seed in (("a", 1), ("b", 1), ("c", 2))
    )
    for name in ("train", "sft", "eval"):
        tables = [pq.read_table(getattr(made, name)) for made in (first, again, other)]
        assert tables[0] == tables[1] != tables[2]
    weights = [(made.model / "model.safetensors").read_bytes() for made in (first, again, other)]
    assert weights[0] == weights[1] != weights[2]
    with pytest.raises(DataError, match="num_eval is 0; it must be at least 1"):
        make_squares(tmp_path / "none", num_eval=0)


def test_the_model_is_what_transformers_expects(files: SquaresFiles) -> None:
    model, loading = AutoModelForImageTextToText.from_pretrained(files.model, output_loading_info=True)
    assert {kind: names for kind, names in loading.items() if names} == {}
    assert type(model).__name__ == "Qwen2_5_VLForConditionalGeneration"
    assert read_model_shape(files.model) == SHAPE.as_model()


@pytest.mark.patient
def test_the_files_load_as_a_data_set_with_a_token_for_each_cell(files: SquaresFiles) -> None:
    def read(path: Path, kind: RowKind) -> PromptSet:
        config = DataConfig(train=(path,), max_prompt_tokens=32)
        images = ImageReader(model=files.model, vision=vision_of(SHAPE.as_model()))
        reader = PromptReader(config=config, kind=kind, images=images, max_response_tokens=4)
        return reader.read((path,), load_tokenizer(files.model, vocab=SHAPE.vocab))

    for prompt, pixels in zip(read(files.eval, "prompts").prompts, drawn(files.eval), strict=True):
        (image,) = prompt.images
        assert (image.num_rows * CELL, image.num_columns * CELL) == pixels.shape[:2]
    assert all(prompt.demonstration is not None for prompt in read(files.sft, "demonstrations").prompts)
