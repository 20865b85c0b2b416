"""The environment serves its user's own scripts, notebooks and lm-eval: without megarl and its stand-ins."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

USERS_SCRIPT = """
import json, sys
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

config = LlamaConfig(vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2)
tokens = torch.arange(12)[None]
model = LlamaForCausalLM(config)
first = model(input_ids=tokens, labels=tokens).loss
first.backward()
with torch.no_grad():
    for parameter in model.parameters():
        parameter -= 0.1 * parameter.grad
second = model(input_ids=tokens, labels=tokens).loss
answer = AutoModelForCausalLM.from_config(config).generate(tokens, max_new_tokens=4, min_new_tokens=4, do_sample=False)
ours = [name for name in sys.modules if name.partition(".")[0] == "megarl"]
print(json.dumps([first.item(), second.item(), list(answer.shape), ours]))
"""


@pytest.mark.patient
def test_transformers_trains_and_generates_in_a_process_without_megarl(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", USERS_SCRIPT],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    first, second, shape, ours = json.loads(done.stdout.splitlines()[-1])
    assert second < first
    assert shape == [1, 16]
    assert ours == []


def test_torchvision_is_installed_only_beside_the_build_of_torch_that_it_fits() -> None:
    has_torchvision = find_spec("torchvision") is not None
    assert has_torchvision is (torch.version.cuda is not None), "remove .venv and run `make setup`"
