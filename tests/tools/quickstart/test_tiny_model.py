from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from megarl.config.model import read_model_shape
from megarl.tools.quickstart.tiny_model import TinyShape, write_tiny_model

SHAPE = TinyShape(num_layers=2, hidden=32, ffn_hidden=48, num_heads=4, num_kv_heads=2)


@pytest.mark.parametrize("has_tied_embeddings", [True, False])
def test_the_folder_is_what_transformers_expects_of_a_qwen2(has_tied_embeddings: bool, tmp_path: Path) -> None:
    write_tiny_model(tmp_path, replace(SHAPE, has_tied_embeddings=has_tied_embeddings), seed=1)
    from transformers import Qwen2ForCausalLM

    model, loading = Qwen2ForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(loading.values()), loading
    assert model.config.tie_word_embeddings is has_tied_embeddings
    parameters = dict(model.named_parameters())
    weights = load_file(tmp_path / "model.safetensors")
    assert parameters.keys() == weights.keys()
    assert all(torch.equal(parameters[name], weights[name]) for name in weights)


def test_the_shape_is_read_back_as_it_was_written(tmp_path: Path) -> None:
    write_tiny_model(tmp_path, SHAPE, seed=1)
    shape = read_model_shape(tmp_path)
    assert shape.family == "qwen2"
    assert (shape.num_layers, shape.hidden, shape.ffn_hidden) == (2, 32, 48)
    assert (shape.num_heads, shape.num_kv_heads, shape.head_dim) == (4, 2, 8)
    assert (shape.vocab, shape.has_tied_embeddings, shape.dtype) == (SHAPE.vocab, False, "float32")


def test_norms_start_at_one_biases_at_zero_and_the_rest_at_random(tmp_path: Path) -> None:
    write_tiny_model(tmp_path, replace(SHAPE, weight_std=0.05), seed=1)
    for name, tensor in load_file(tmp_path / "model.safetensors").items():
        if name.endswith("norm.weight"):
            assert torch.equal(tensor, torch.ones_like(tensor))
        elif name.endswith("bias"):
            assert torch.equal(tensor, torch.zeros_like(tensor))
        else:
            assert tensor.std().item() == pytest.approx(0.05, rel=0.2)
