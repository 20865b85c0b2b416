from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file

from megarl.config.model import read_model_shape
from megarl.config.recipe import DataConfig
from megarl.data.prompts import PromptReader
from megarl.data.tokenizer import load_tokenizer
from megarl.errors import DataError
from megarl.families import PUBLIC_MODELS
from megarl.tools.quickstart.arithmetic import (
    CARELESS_PROBABILITY,
    SHAPE,
    ArithmeticFiles,
    careless_sum,
    make_arithmetic,
)
from megarl.tools.quickstart.tiny_model import TinyShape, write_tiny_model


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> ArithmeticFiles:
    return make_arithmetic(tmp_path_factory.mktemp("arithmetic"), num_train=6000, num_sft=4000, num_eval=500, seed=3)


def rows(path: Path) -> list[dict[str, object]]:
    found: list[dict[str, object]] = pq.read_table(path).to_pylist()
    return found


def problems(path: Path) -> list[tuple[int, int]]:
    """The two numbers of every row, read back from the question itself."""
    questions = pq.read_table(path)["prompt"].to_pylist()
    return [(int(a), int(b)) for a, b in (question[0]["content"].rstrip("=").split("+") for question in questions)]


def test_held_out_problems_are_never_trained_on_in_either_order(files: ArithmeticFiles) -> None:
    held_out = {frozenset(problem) for problem in problems(files.eval)}
    seen = {frozenset(problem) for path in (files.train, files.sft, files.pairs) for problem in problems(path)}
    assert held_out
    assert not held_out & seen


def test_train_and_eval_ask_each_problem_once(files: ArithmeticFiles) -> None:
    for path, count in ((files.train, 6000), (files.eval, 500)):
        assert len(problems(path)) == len(set(problems(path))) == count


def test_the_ground_truth_is_the_sum(files: ArithmeticFiles) -> None:
    for path in (files.train, files.sft, files.eval):
        truths = [truth["ground_truth"] for truth in pq.read_table(path)["reward_model"].to_pylist()]
        assert truths == [str(a + b) for a, b in problems(path)]


def test_the_teacher_is_right_or_forgets_every_carry(files: ArithmeticFiles) -> None:
    responses = pq.read_table(files.sft)["response"].to_pylist()
    lessons = list(zip(problems(files.sft), responses, strict=True))
    assert all(response in (str(a + b), careless_sum(a, b)) for (a, b), response in lessons)
    with_carry = [response == careless_sum(a, b) for (a, b), response in lessons if careless_sum(a, b) != str(a + b)]
    assert sum(with_carry) / len(with_carry) == pytest.approx(CARELESS_PROBABILITY, abs=0.03)
    # Imitating the likelier answer everywhere must stay below a half.
    right_without_carries = sum(careless_sum(a, b) == str(a + b) for a, b in problems(files.eval)) / 500
    assert right_without_carries < 0.4


@pytest.mark.parametrize(("a", "b", "careless"), [(12, 34, "46"), (67, 58, "15"), (50, 50, "00"), (19, 11, "20")])
def test_a_careless_sum_adds_column_by_column(a: int, b: int, careless: str) -> None:
    assert careless_sum(a, b) == careless


def test_the_seed_decides_everything(tmp_path: Path) -> None:
    first, again, other = (
        make_arithmetic(tmp_path / name, seed=seed, num_train=20, num_sft=20, num_eval=20)
        for name, seed in (("a", 1), ("b", 1), ("c", 2))
    )
    for name in ("train", "sft", "pairs", "eval"):
        assert rows(getattr(first, name)) == rows(getattr(again, name)) != rows(getattr(other, name))
    weights = [(made.model / "model.safetensors").read_bytes() for made in (first, again, other)]
    assert weights[0] == weights[1] != weights[2]


def test_a_number_of_problems_that_cannot_be_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"num_eval is 2000; it must be between 1 and \d+"):
        make_arithmetic(tmp_path, num_eval=2000)
    with pytest.raises(DataError, match="num_sft is 0; it must be at least 1"):
        make_arithmetic(tmp_path, num_sft=0)
    assert not list(tmp_path.iterdir())


@pytest.mark.patient
def test_the_files_load_as_a_data_set(files: ArithmeticFiles) -> None:
    tokenizer = load_tokenizer(files.model, vocab=SHAPE.vocab)
    config = DataConfig(train=(files.train,), max_prompt_tokens=8)
    assert len(PromptReader(config=config, kind="prompts").read((files.eval,), tokenizer).prompts) == 500
    reader = PromptReader(config=config, kind="demonstrations", max_response_tokens=4)
    prompts = reader.read((files.sft,), tokenizer).prompts
    answers = [
        tokenizer.decode_response(prompt.demonstration) for prompt in prompts if prompt.demonstration is not None
    ]
    assert answers == pq.read_table(files.sft)["response"].to_pylist()


def test_a_model_may_have_the_size_of_a_public_one_in_bfloat16(tmp_path: Path) -> None:
    small = replace(TinyShape.like(PUBLIC_MODELS["qwen2.5-0.5b"]), num_layers=1, hidden=28, ffn_hidden=32, vocab=300)
    write_tiny_model(tmp_path, small, seed=1)
    shape = read_model_shape(tmp_path)
    assert (shape.num_heads, shape.num_kv_heads, shape.vocab, shape.has_tied_embeddings) == (14, 2, 300, True)
    halves = load_file(tmp_path / "model.safetensors")
    assert {tensor.dtype for tensor in halves.values()} == {torch.bfloat16}
    write_tiny_model(tmp_path, replace(small, dtype="float32"), seed=1)
    for name, tensor in load_file(tmp_path / "model.safetensors").items():
        assert torch.equal(halves[name], tensor.bfloat16()), name


def test_a_pair_prefers_the_sum_to_the_one_without_carries(files: ArithmeticFiles) -> None:
    rows = pq.read_table(files.pairs).to_pylist()
    assert rows
    for (a, b), row in zip(problems(files.pairs), rows, strict=True):
        assert row["chosen"] == str(a + b)
        assert row["rejected"] == careless_sum(a, b) != row["chosen"]
