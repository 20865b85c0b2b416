"""`megarl plan` as a person sees it, without an engine on the machine."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from megarl.cli.main import run
from megarl.cli.plan import WIDTH
from megarl.tools.quickstart.tiny_model import TinyShape, write_tiny_model
from tests.planner.recipes import large_recipes, make_recipe
from tests.planner.runs import write_run
from tests.repository import ROOT

RECIPES = ROOT / "recipes"


@pytest.mark.patient
@pytest.mark.parametrize("name", large_recipes())
def test_shipped_recipes_fit_the_gpu_they_name(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    recipe, path = large_recipes()[name], RECIPES / f"{name}.yaml"
    gpu, text = str(recipe.cluster.gpu), path.read_text()
    assert gpu.upper() in text or "\nextends: " in text
    assert run(["plan", str(path)]) == 0
    out = capsys.readouterr().out
    assert f" x {gpu} on " in out.splitlines()[0]
    assert max(len(line) for line in out.splitlines()) <= WIDTH
    (left,) = re.findall(r"\nfits: at least (\S+) GiB are left", out)
    assert float(left) > 4.5
    for title in ("Placement", "Memory of the fullest GPU, GiB", "Time of a step"):
        assert title in out
    publishes_versions = recipe.roles.rollout is not None and recipe.model.lora is None
    assert ("Publishing one version" in out) is publishes_versions


@pytest.mark.patient
def test_a_large_recipe_is_planned_quickly_and_without_an_engine() -> None:
    code = (
        "import re, sys, time; began = time.process_time(); from megarl.cli.main import run;"
        "code = run(sys.argv[1:]); seconds = time.process_time() - began;"
        # Not `ru_maxrss`: on Linux a child starts with the peak of its parent.
        "mib = int(re.search(r'VmHWM:\\s+(\\d+)', open('/proc/self/status').read())[1]) / 1024;"
        "loaded = {'torch', 'ray', 'megatron', 'sglang', 'transformers'} & set(sys.modules);"
        "sys.exit(f'{loaded}, {seconds} s, {mib} MiB' if loaded or seconds > 5 or mib > 500 else code)"
    )
    nodes = ["--set", "pools.train.nodes=64", "--set", "pools.rollout.nodes=32"]
    command = [sys.executable, "-c", code, "plan", str(RECIPES / "grpo_70b.yaml"), *nodes]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "768 x h100 on 96 node(s)" in done.stdout


def test_every_role_and_its_work_is_in_the_tables(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", str(RECIPES / "ppo_70b.yaml")]) == 0
    out = capsys.readouterr().out
    for text in ("GiB: actor", "GiB: critic", "GiB: engine", "reference weights", "critic's snapshot, while saving"):
        assert text in out
    for phase in ("old log-probabilities", "reference log-probabilities", "values", "critic update"):
        assert f"\n  {phase} " in out
    assert "in parallel" in out


@pytest.mark.parametrize(("most", "is_on"), [(8, False), (4096, True)])
def test_a_plan_says_whether_engines_draft(most: int, is_on: bool, capsys: pytest.CaptureFixture[str]) -> None:
    draft = f"roles.rollout.draft={{kind: ngram, max_requests: {most}}}"
    assert run(["plan", str(RECIPES / "grpo_7b.yaml"), "--set", draft]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert ("drafts of 7 tokens from n-grams of responses; times are without drafts" in shown) is is_on
    assert ("no drafts: with more than 8 requests" in shown) is not is_on


def test_a_plan_counts_a_draft_that_learns_and_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_tiny_model(tmp_path, TinyShape(), seed=0)
    changes = (
        f"roles.rollout.draft={{kind: model, path: {tmp_path}}}",
        "pools.spare={gpus_per_node: 1}",
        "roles.drafter={pool: spare, every_steps: 4}",
    )
    words = [word for change in changes for word in ("--set", change)]
    assert run(["plan", str(RECIPES / "grpo_7b.yaml"), *words]) == 2
    assert "drafts with up to 32: none would use what it learns" in capsys.readouterr().err
    assert run(["plan", str(RECIPES / "grpo_7b.yaml"), *words, "--set", "roles.rollout.draft.max_requests=4096"]) == 0
    out = capsys.readouterr().out
    assert f"drafts of 3 tokens from {tmp_path}, which learns every 4 steps" in " ".join(out.split())
    assert "drafter's snapshot, while saving" in out
    assert "\n  draft update " in out


def test_towers_and_their_images_are_in_the_tables_and_in_the_notes(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", str(RECIPES / "grpo_qwen25_vl_7b.yaml"), "--shape", "qwen3-vl-8b"]) == 0
    out = capsys.readouterr().out
    for row in ("tower", "images (about)", "remembered images (about)", "engine tower", "engine images (about)"):
        assert f"\n  {row} " in out
    assert "images: assumes one of 294 tokens in each prompt, and none of more than 588 (data.max_image_pixels)" in out


def test_what_does_not_fit_comes_with_a_way_out(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["plan", str(RECIPES / "grpo_7b.yaml"), "--set", "roles.rollout.memory_fraction=0.99"]
    assert run(arguments) == 2
    lines = capsys.readouterr().out.splitlines()
    verdict = next(line for line in lines if line.startswith("does not fit"))
    assert verdict.endswith("GiB too much (engine, generating)")
    assert any(line.startswith("  fits with --set roles.rollout.memory_fraction=0.75") for line in lines)


def test_json_holds_every_rank(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", str(RECIPES / "grpo_7b.yaml"), "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["fits"] is True
    assert plan["shapes"]["source"] == "public model qwen2.5-7b"
    assert [rank["rank"] for rank in plan["placement"]["models"]["actor"]["ranks"]] == [0, 1, 2, 3]
    assert (plan["reshard"]["way"], plan["reshard"]["staging_bytes"]) == ("memory", 0)


def test_a_change_is_shown_beside_the_recipe(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["plan", str(RECIPES / "grpo_7b.yaml"), "--what-if", "pools.rollout.gpus_per_node=8"]
    assert run(arguments) == 0
    rows = {line.split("  ")[1]: line.split()[-2:] for line in capsys.readouterr().out.splitlines() if "  " in line}
    assert rows["GPUs"] == ["8", "12"]
    before, after = rows["rollout, s"]
    assert float(after) < float(before)


def test_a_recipe_that_is_wrong_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", str(RECIPES / "grpo_7b.yaml"), "--set", "roles.actor.tensor=3"]) == 2
    _, *lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 3


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--set", "model.path=mine"], "model.path: mine is neither here nor a known model; name a shape with --shape"),
        (["--shape", "gpt-5"], "--shape: unknown 'gpt-5'; one of deepseek-v2-lite"),
        (["--gpu", "v100"], "v100: unknown 'v100'; one of a100, a100-40g, h20, h100, h200"),
    ],
)
def test_what_cannot_be_planned_is_explained(
    arguments: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["plan", str(RECIPES / "grpo_7b.yaml"), *arguments]) == 2
    assert complaint in capsys.readouterr().err


def test_a_cpu_recipe_is_planned_without_rates(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good = ROOT / "tests" / "config" / "good.yaml"
    assert run(["plan", str(good), "--shape", "qwen2.5-0.5b"]) == 0
    out = capsys.readouterr().out
    assert "a CPU run has no limit to compare it with" in out
    assert "Time of a step" not in out


def test_another_shape_can_be_tried_and_a_padded_vocabulary_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", str(RECIPES / "grpo_70b.yaml"), "--shape", "llama-3.1-70b"]) == 0
    out = capsys.readouterr().out
    assert "shape from public model llama-3.1-70b" in out
    assert "the vocabulary of 128,256 is padded to 128,512 rows for tensor 8" in out


def test_publishing_is_shown_with_its_links_its_floor_and_its_hash(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", str(RECIPES / "grpo_70b.yaml")]) == 0
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    links = ("over same node", "over network", "buckets in each engine rank", "communicator in each")
    for words in (*links, "estimate from", "lower bound of any plan"):
        assert any(line.startswith(words) for line in lines), words
    assert any(line.endswith("349 rounds; hops: 2") for line in lines)
    assert "between nodes: rounds on one NCCL communicator; within a node: CUDA IPC" in lines
    assert any(line.startswith("plan ") and len(line) == len("plan ") + 32 for line in lines)


@pytest.mark.patient
def test_a_run_is_replayed_its_error_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_run(tmp_path, make_recipe(), {"generate": 2.0})
    recipe = RECIPES / "grpo_7b.yaml"
    arguments = ["plan", str(recipe), "--from", str(folder), "--shape", "qwen2.5-7b"]
    assert run([*arguments, "--what-if", "pools.rollout.gpus_per_node=8"]) == 0
    out = capsys.readouterr().out
    assert max(len(line) for line in out.splitlines()) <= WIDTH
    places = [
        out.index(text) for text in ("6 steps up to 7", "factor", "error of the model on the run: -", "A step, seconds")
    ]
    assert places == sorted(places)
    (row,) = (line.split() for line in out[places[-1] :].splitlines() if line.startswith("  generate"))
    recorded, as_it_is, changed = map(float, row[1:])
    assert changed < as_it_is
    assert run([*arguments, "--json"]) == 0
    replay = json.loads(capsys.readouterr().out)["replay"]
    assert replay["corrected_error"] == pytest.approx(0, abs=1e-6)
    assert replay["parts"]["generate"]["recorded_s"] == pytest.approx(recorded, abs=0.01)


def test_a_folder_without_a_run_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", str(RECIPES / "grpo_7b.yaml"), "--from", str(tmp_path)]) == 3
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.patient
def test_the_cost_of_a_step_and_of_the_run_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    recipe = str(RECIPES / "dapo_32b.yaml")
    priced = ["--set", "cluster.gpu_hour_price=2.5", "--set", "run.steps=10"]
    assert run(["plan", recipe, *priced]) == 0
    shown = re.search(
        r"cost: ([\d.,]+) GPU h \(([\d.,]+)\) a step; 10 steps: ([\d.]+) days, ([\d,]+) GPU h \(([\d.,]+)\)",
        " ".join(capsys.readouterr().out.split()),
    )
    assert shown is not None
    _, step, days, hours, money = (float(number.replace(",", "")) for number in shown.groups())
    assert money == pytest.approx(10 * step, rel=1e-3)
    assert hours == pytest.approx(money / 2.5, rel=1e-2)
    assert hours == pytest.approx(days * 24 * 128, rel=0.1)
    assert run(["plan", recipe, *priced, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["step_cost"] == pytest.approx(step, rel=1e-3)
    assert run(["plan", recipe]) == 0
    assert re.search(r"cost: [\d.,]+ GPU h a step;", capsys.readouterr().out)
