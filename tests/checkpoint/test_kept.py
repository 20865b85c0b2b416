from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from megarl.checkpoint.save import KEPT_FILE, _copy_kept, write_index
from megarl.checkpoint.tensor_files import read_tensor_folder
from megarl.families import family_of
from tests.tiny_models import is_read, write_tiny_model


def test_a_checkpoint_has_the_tower_as_it_came_and_is_a_whole_model(tmp_path: Path) -> None:
    source, saved = tmp_path / "model", tmp_path / "saved"
    shape = write_tiny_model(source, "qwen3_vl", layers=2)
    tensors = load_file(source / "model.safetensors")
    trained = {name: tensor + 1 for name, tensor in tensors.items() if is_read(name)}
    saved.mkdir()
    save_file(trained, saved / "model-00001-of-00001.safetensors")
    size = sum(tensor.nbytes for tensor in trained.values())
    write_index(saved, dict.fromkeys(trained, "model-00001-of-00001.safetensors"), num_bytes=size)

    digests = _copy_kept(source, saved, family_of(shape).kept)

    assert read_tensor_folder(saved).keys() == tensors.keys()  # compares the index with the files
    kept = load_file(saved / KEPT_FILE)
    assert kept.keys() == tensors.keys() - trained.keys()
    for name, tensor in kept.items():
        assert torch.equal(tensor, tensors[name]), name
    index = json.loads((saved / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in tensors.values())
    assert digests[KEPT_FILE].num_bytes == (saved / KEPT_FILE).stat().st_size
