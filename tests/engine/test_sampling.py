"""Tokens are drawn as often as their probabilities say, by the function that SGLang calls."""

from __future__ import annotations

import ast
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from megarl.engine.prefills import TARGET
from megarl.engine.sampling import _DRAW, drawn, unless_seeded


def test_tokens_come_as_often_as_their_probabilities_say() -> None:
    torch.manual_seed(0)
    rare = torch.full((1000,), 0.2 / 1000)
    row = torch.cat([torch.tensor([0.0, 0.5]), rare, torch.tensor([0.3, 0.0])])
    tokens = drawn(row.expand(20_000, -1))
    assert tokens.dtype == torch.int32
    counts = torch.bincount(tokens.long(), minlength=len(row)) / len(tokens)
    shares = torch.tensor([counts[1], counts[-2], counts[2:-2].sum()])
    assert torch.allclose(shares, torch.tensor([0.5, 0.3, 0.2]), atol=0.015), shares
    assert counts[0] == counts[-1] == 0, "these have no probability"


@pytest.mark.parametrize(("number", "token"), [(0.0, 1), (1 - 2**-24, 6)], ids=["smallest", "largest"])
def test_no_random_number_names_a_token_without_a_probability(
    monkeypatch: pytest.MonkeyPatch, number: float, token: int
) -> None:
    monkeypatch.setattr(torch, "rand_like", lambda total: torch.full_like(total, number))
    nothing = torch.zeros(4096, 1)
    rows = torch.cat([nothing, torch.rand(4096, 6) + 1e-3, nothing], dim=1)
    rows /= 8 * torch.rand(4096, 1) + 0.5  # whatever they sum to
    assert set(drawn(rows).tolist()) == {token}


def test_seeded_draws_are_sglangs() -> None:
    asked: list[tuple[object, ...]] = []

    def draw(*arguments: object) -> torch.Tensor:
        asked.append(arguments)
        return torch.tensor([5])

    seed, places = torch.tensor([1]), torch.tensor([2])
    assert unless_seeded(draw, torch.ones(1, 3), seed, places).tolist() == [5]
    assert asked[0][1:] == (seed, places)
    assert unless_seeded(draw, torch.tensor([[0.0, 1.0]])).tolist() == [1]
    assert len(asked) == 1


def test_the_function_that_is_hooked_is_there() -> None:
    """No CPU imports it."""
    spec = find_spec("sglang")
    assert spec is not None
    assert spec.origin is not None
    text = (Path(spec.origin).parent / "srt" / "layers" / "sampler.py").read_text()
    (function,) = [
        node
        for node in ast.parse(text).body
        if isinstance(node, ast.FunctionDef) and node.name == _DRAW.rpartition(".")[2]
    ]
    assert [each.arg for each in function.args.args] == ["probs", "sampling_seed", "positions"]
    assert f"= {function.name}(" in text


def test_a_worker_that_the_server_spawns_registers_the_hooks() -> None:
    """Python runs the server's module in it under another name."""
    code = """
import runpy, sys
runpy.run_module("megarl.engine.server", run_name="__mp_main__")
from sglang.srt.plugins.hook_registry import HookRegistry
print(sorted(HookRegistry._hooks), sys.modules["megatron"])
"""
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, timeout=600)
    assert done.stdout.splitlines()[-1:] == [f"{sorted([_DRAW, TARGET])} None"], done.stderr
