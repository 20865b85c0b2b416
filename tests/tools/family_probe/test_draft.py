from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import transformers

from megarl.cli.main import run
from megarl.config.roles import ActorConfig
from megarl.families import BY_NAME
from megarl.families.fields import Fields
from megarl.tools.family_probe.draft import Draft, Evidence, LoadedEngine, draft, load_draft
from megarl.tools.family_probe.evidence import draft_family, tiny_config
from megarl.tools.family_probe.probe import _described, numbered
from megarl.tools.small_recipe import tiny_shape
from megarl.weights.layouts.canonical import canonical_tensors
from megarl.weights.layouts.sglang import sglang_layout
from tests.tiny_models import write_tiny_model
from tests.weights.reference import make_shape

SIZES = {
    "vocab_size": 99,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
NAMED_IN_MEGATRON = {
    "deepseek_v3": (14, 26),
    "gemma3_text": (14, 20),
    "glm4_moe": (22, 22),
    "llama": (6, 6),
    "mistral": (6, 6),
    "mixtral": (7, 7),
    "phi3": (6, 6),
    "qwen2": (7, 7),
    "qwen2_moe": (10, 11),
    "qwen3": (8, 8),
    "qwen3_moe": (9, 9),
}
"""Parameters of Megatron that the draft of a known family has as the family's file has them, and all of them."""


def evidence_of(family: str) -> Evidence:
    """Return what engines would show that hold what the family's file says."""
    shape = tiny_shape(make_shape(family), ActorConfig(pool="probe"))
    shape = replace(shape, has_tied_embeddings=family == "gemma3_text")
    numbers = numbered({name: spec.shape for name, spec in canonical_tensors(shape).items()})
    engines = []
    for tensor, expert in ((1, 1), (2, 1), (2, 2)) if shape.experts else ((1, 1), (2, 1)):
        layout = sglang_layout(shape, tensor=tensor, expert=expert, dtype="float32", is_cpu_engine=True)
        ranks = tuple(_described(holding, numbers) for holding in layout.holdings)
        engines.append(LoadedEngine(expert=expert, ranks=ranks))
    config = BY_NAME[family].config_json(shape)
    return Evidence(config=config, own_config=config, numbered=numbers, engines=tuple(engines))


def compare(made: Draft, family: str, config: dict[str, object]) -> None:
    """Hold a draft against the file of its family: tensors and engines must be as there, and as much of Megatron."""
    fields = Fields(content=config, source="config.json")
    known, drafted = BY_NAME[family], load_draft(made.source)
    assert (drafted.name, drafted.architecture) == (known.name, known.architecture)
    assert drafted.engine.module == known.engine.module or family == "phi3"  # SGLang has its class under two names
    real, own = (list(each.blocks(each.read(fields)).values()) for each in (known, drafted))
    assert {weight for block in real for weight in block.weights} == {
        weight for block in own for weight in block.weights
    }
    # In float32 all dtypes are equal, and a draft says so.
    served, drawn = ({replace(param, dtype=None) for block in each for param in block.sglang} for each in (real, own))
    assert served == drawn
    trained = [param for block in real for param in block.megatron]
    found = {param for block in own for param in block.megatron}
    assert (sum(param in found for param in trained), len(trained)) == NAMED_IN_MEGATRON[family]
    assert made.num_described == made.num_parameters


@pytest.mark.parametrize("family", NAMED_IN_MEGATRON)
def test_the_draft_of_a_known_family_is_near_its_file(family: str) -> None:
    evidence = evidence_of(family)
    compare(draft(evidence), family, dict(evidence.config))


@pytest.mark.slow
@pytest.mark.parametrize("family", NAMED_IN_MEGATRON)
@pytest.mark.usefixtures("real_engines")
def test_the_draft_of_what_sglang_loads_is_near_the_file_of_the_family(family: str, tmp_path: Path) -> None:
    write_tiny_model(tmp_path / "model", family, layers=2)
    made = draft_family(tmp_path / "model", work=tmp_path / "work")
    compare(made, family, json.loads((tmp_path / "work" / "model" / "config.json").read_text()))


def write_unknown(folder: Path, name: str) -> Path:
    config = getattr(transformers, f"{name}Config")(**SIZES)
    getattr(transformers, f"{name}ForCausalLM")(config).save_pretrained(folder)
    return folder


@pytest.mark.usefixtures("real_engines")
def test_the_probe_writes_a_first_description_of_an_unknown_family(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_unknown(tmp_path / "model", "Olmo2")
    monkeypatch.chdir(tmp_path)
    assert run(["family", "probe", str(folder)]) == 0
    said = capsys.readouterr().out
    assert said.startswith("olmo2.py: 16 of 16 parameters of SGLang's layers, every element\n")
    assert "undecided: the name of self_attn.q_norm.weight in Megatron, and what computes it" in said
    source = (tmp_path / "olmo2.py").read_text()
    family = load_draft(source)
    assert (family.name, family.engine.module) == ("olmo2", "olmo2")
    # Norms of whole queries and keys, and norms behind the blocks: nobody has guessed what computes them.
    assert 'same("self_attn.q_norm.weight", (shape.hidden,), "UNDECIDED.self_attn.q_norm.weight")' in source
    assert "gated(" in source
    assert "input_norm" not in source
    assert run(["family", "probe", str(folder)]) == 2
    assert "olmo2.py exists; name another file with --draft" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.usefixtures("real_engines")
def test_a_draft_says_that_layers_with_known_tensors_compute_something_else(tmp_path: Path) -> None:
    folder = write_unknown(tmp_path / "model", "Granite")
    made = draft_family(folder, work=tmp_path / "work")
    assert "config.json has attention_multiplier: 1.0, which nothing reads" in made.undecided
    assert any(each.startswith("what layers compute: ") and "differ from llama's by" in each for each in made.undecided)


@pytest.mark.slow
@pytest.mark.usefixtures("real_engines")
def test_a_draft_says_which_known_family_computes_the_same(tmp_path: Path) -> None:
    write_tiny_model(tmp_path / "model", "mistral", layers=2)
    made = draft_family(tmp_path / "model", work=tmp_path / "work")
    same = "whether it is llama: with the same tensors both compute the same logits in transformers"
    assert same in made.undecided


def test_a_tiny_model_keeps_every_kind_of_layer() -> None:
    kinds = ["near"] * 5 + ["far"] + ["near"] * 5 + ["far"]
    config = {"num_hidden_layers": 12, "num_attention_heads": 8, "hidden_size": 256, "layer_types": kinds}
    tiny = tiny_config(config)
    assert tiny["num_hidden_layers"] == 4
    assert tiny["layer_types"] == ["near", "near", "near", "far"]
