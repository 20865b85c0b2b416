"""The command line of a server, its process from start to end, and its deadlines."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megarl.config.lora import SERVED_AS
from megarl.config.native import owned, read_library
from megarl.config.roles import RolloutRoleConfig
from megarl.config.section import Device
from megarl.engine import admin
from megarl.engine.client import EngineClient, GenerateRequest
from megarl.engine.log import last_message
from megarl.engine.process import (
    EngineAdapters,
    EngineProcess,
    EngineSpec,
    command_line,
    deadlines_of,
    graph_sizes,
    serves_text_alone,
)
from megarl.env import engine_environment
from megarl.errors import MachineError
from megarl.families import PUBLIC_MODELS, family_of
from megarl.system.proc import ZOMBIE, all_processes
from megarl.types import PolicyVersion
from megarl.weights.layouts.fp8 import quantization_config
from tests.engine.engines import EOS, REQUEST_TIMEOUT_S, ServedModel, engine_spec
from tests.tiny_models import FAMILIES, greedy_tokens, write_tiny_model
from tests.weights.reference import block_shape

PROMPT = tuple(range(3, 12))


def group_members(group: int) -> list[int]:
    """Processes of a group that are more than an entry nobody has collected yet."""
    return [process.pid for process in all_processes() if process.group == group and process.state != ZOMBIE]


def wait_until_gone(group: int, timeout_s: float) -> list[int]:
    deadline = time.monotonic() + timeout_s
    while (left := group_members(group)) and time.monotonic() < deadline:
        time.sleep(0.1)
    return left


def words_of(spec: EngineSpec) -> list[str]:
    return command_line(spec, port=1234, keys_path=spec.run_folder / "keys.yaml")


def test_engines_with_windows_take_our_classes_where_triton_may_decode(tmp_path: Path) -> None:
    plain = engine_spec(tmp_path / "model", tmp_path / "run")
    on_gpu = replace(plain, device="cuda")
    assert [spec.has_own_classes for spec in (plain, on_gpu)] == [False, False]
    windows = [replace(spec, has_windows=True) for spec in (plain, on_gpu)]
    assert [spec.has_own_classes for spec in windows] == [False, True]


def test_keys_are_in_neither_command_line_nor_log_nor_left_in_a_file(served: ServedModel) -> None:
    process = served.process
    secrets = (process.spec.keys.api, process.spec.keys.admin)
    commands = [Path(f"/proc/{pid}/cmdline").read_text() for pid in group_members(process.pid)]
    shown = "".join(commands) + process.spec.log_path.read_text()
    assert "api_key" in shown
    assert not any(secret in shown for secret in secrets)
    assert [path.name for path in process.spec.log_path.parent.iterdir()] == ["engine_0.log"]


def test_the_server_has_a_process_group_of_its_own(served: ServedModel) -> None:
    assert os.getpgid(served.process.pid) == served.process.pid
    # The guard, the server, its detokenizer, and a scheduler per TP rank.
    assert len(group_members(served.process.pid)) >= 3 + served.process.spec.config.tensor


def test_options_follow_the_role_and_the_device(tmp_path: Path) -> None:
    spec = engine_spec(tmp_path / "model", tmp_path, tensor=2)
    words = words_of(spec)
    options = dict(pairwise(words))
    assert words[:3] == [sys.executable, "-m", "megarl.engine.cpu"]
    assert options["--tp-size"] == "2"
    assert options["--dtype"] == "float32"
    assert options["--max-total-tokens"] == "32768"
    assert options["--host"] == "127.0.0.1"
    assert options["--weight-version"] == "0"
    assert "--enable-deterministic-inference" in words
    assert "--enable-fp32-lm-head" not in words
    precise = replace(spec, has_float32_head=True)
    assert "--enable-fp32-lm-head" in words_of(precise)


def test_an_engine_that_a_publish_fills_reads_no_weights_and_has_no_version(tmp_path: Path) -> None:
    spec = replace(engine_spec(tmp_path / "model", tmp_path), loads_weights=False)
    seeing = replace(spec, images=tmp_path / "images")
    # No publish brings what sees images.
    for each, kind in ((spec, "dummy"), (seeing, "auto")):
        options = dict(pairwise(words_of(each)))
        assert options["--load-format"] == kind
        assert not options["--weight-version"].isdigit()


def test_an_engine_with_fp8_weights_gets_the_config_of_an_fp8_checkpoint(tmp_path: Path) -> None:
    spec = replace(engine_spec(tmp_path / "model", tmp_path), device="cuda", quantization='{"quantization_config": {}}')
    options = dict(pairwise(words_of(spec)))
    assert options["--quantization"] == "fp8"
    assert options["--json-model-override-args"] == '{"quantization_config": {}}'
    plain = words_of(replace(spec, quantization=None))
    assert not {"--quantization", "--json-model-override-args"} & set(plain)


def test_a_model_that_sees_images_keeps_its_tower_where_requests_are_text() -> None:
    """SGLang's class of Qwen2.5-VL gets no positions without it; Qwen3.5 is a model of text, whose files have one."""
    found = {name: serves_text_alone(PUBLIC_MODELS[name]) for name in ("qwen2.5-vl-7b", "qwen3-vl-8b", "qwen3.5-27b")}
    assert found == {"qwen2.5-vl-7b": False, "qwen3-vl-8b": False, "qwen3.5-27b": True}


def test_adapters_of_a_shared_expert_and_another_field_of_the_model_are_one_option(tmp_path: Path) -> None:
    """SGLang takes the last of several such options alone."""
    adapters = EngineAdapters(rank=4, modules=tuple(SERVED_AS.values()), num_loaded=1)
    spec = replace(engine_spec(tmp_path / "model", tmp_path), adapters=adapters, temperature=0.5, is_text_alone=True)
    words = words_of(spec)
    (at,) = (index for index, word in enumerate(words) if word == "--json-model-override-args")
    assert json.loads(words[at + 1]) == {
        "language_model_only": True,
        "logit_scale": 2.0,
        "has_adapted_shared_expert": True,
    }


READ_BY_SGLANG = """
import json, sys
from megarl.engine import cpu
cpu.install()
from sglang.srt.layers.quantization.fp8 import Fp8Config
from sglang.srt.layers.quantization.utils import is_layer_skipped
config = Fp8Config.from_config(json.loads(sys.argv[1])["quantization_config"])
skipped = [name for name in sys.argv[2:] if is_layer_skipped(name, config.ignored_layers)]
print(json.dumps([config.weight_block_size, config.is_checkpoint_fp8_serialized, skipped]))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "keep", "expected"),
    [
        ("qwen3", ("model.layers.1.*",), ["1.self_attn.qkv_proj", "1.mlp.gate_up_proj"]),
        ("qwen3_moe", ("*.1.mlp.*",), ["1.mlp.experts"]),
    ],
)
def test_sglang_keeps_the_modules_in_bf16_that_the_recipe_keeps(
    family: str, keep: tuple[str, ...], expected: list[str]
) -> None:
    config = quantization_config(block_shape(family, layers=12), keep)
    assert config is not None
    kinds = ("self_attn.qkv_proj", "mlp.gate_up_proj" if family == "qwen3" else "mlp.experts")
    names = [f"model.layers.{index}.{kind}" for index in (0, 1, 10, 11) for kind in kinds]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", READ_BY_SGLANG, config, *names],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
        env={**os.environ, "SGLANG_USE_CPU_ENGINE": "1"},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    read = json.loads(done.stdout.splitlines()[-1])
    assert read == [[128, 128], True, [f"model.layers.{name}" for name in expected]]


def test_the_cache_of_an_engine_beside_trainers_has_the_planned_size_whatever_is_free(tmp_path: Path) -> None:
    plain = replace(engine_spec(tmp_path / "model", tmp_path), device="cuda", cached_tokens=70_000)
    shared = replace(plain, shares_devices=True)
    fixed = replace(shared, config=shared.config.model_copy(update={"max_cached_tokens": 50_000}))
    words = [words_of(spec) for spec in (plain, shared, fixed)]
    options = [dict(pairwise(item)) for item in words]
    assert [item["--max-total-tokens"] for item in options] == ["70000", "70000", "50000"]
    assert [item["--mem-fraction-static"] for item in options] == ["0.8", "0.95", "0.95"]
    assert ["--enable-memory-saver" in item for item in words] == [False, True, True]
    check = "SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK"
    environments = [
        engine_environment(device="cuda", tensor=1, interface=None, shares_devices=shares) for shares in (False, True)
    ]
    assert [environment.get(check) for environment in environments] == [None, "0"]


@pytest.mark.parametrize(
    ("device", "chosen", "expected"), [("cpu", None, True), ("cuda", None, False), ("cuda", True, True)]
)
def test_decoding_is_deterministic_by_device_unless_the_recipe_decides(
    device: Device, chosen: bool | None, expected: bool, tmp_path: Path
) -> None:
    plain = engine_spec(tmp_path / "model", tmp_path)
    config = plain.config.model_copy(update={"is_deterministic": chosen})
    words = words_of(replace(plain, device=device, config=config))
    assert ("--enable-deterministic-inference" in words) is expected


def test_the_processes_of_several_nodes_differ_in_their_rank_and_their_log(tmp_path: Path) -> None:
    whole = replace(engine_spec(tmp_path / "model", tmp_path, tensor=16), num_nodes=2, rendezvous="10.0.0.1:4000")
    parts = [replace(whole, node=node) for node in range(2)]
    options = [dict(pairwise(words_of(part))) for part in parts]
    assert [item["--node-rank"] for item in options] == ["0", "1"]
    assert all(item["--nnodes"] == "2" and item["--dist-init-addr"] == "10.0.0.1:4000" for item in options)
    assert [part.log_path.name for part in parts] == ["engine_0.log", "engine_0_node_1.log"]


def test_native_options_come_last_in_the_order_of_the_recipe(tmp_path: Path) -> None:
    options: dict[str, object] = {
        "schedule_policy": "lpm",
        "disable_radix_cache": True,
        "enable_mixed_chunk": False,
        "dllm_fdfo": False,
        "cuda_graph_bs_decode": [1, 2, 4],
        "fp8_gemm_runner_backend": "triton",
        "schedule_conservativeness": 0.5,
        "preferred_sampling_params": {"top_p": 0.9},
    }
    plain = engine_spec(tmp_path / "model", tmp_path)
    spec = replace(plain, config=plain.config.model_copy(update={"sglang": options}))
    words, own = (words_of(item) for item in (spec, plain))
    assert words[: len(own)] == own
    assert words[len(own) :] == [
        *("--schedule-policy", "lpm"),
        "--disable-radix-cache",
        "--no-dllm-fdfo",
        *("--cuda-graph-bs-decode", "1", "2", "4"),
        *("--fp8-gemm-backend", "triton"),
        *("--schedule-conservativeness", "0.5"),
        *("--preferred-sampling-params", '{"top_p": 0.9}'),
    ]


def test_graphs_are_captured_for_the_batches_that_occur_unless_the_recipe_says_which(tmp_path: Path) -> None:
    config = RolloutRoleConfig(pool="rollout", max_running_requests=20)
    spec = replace(engine_spec(tmp_path, tmp_path, tensor=1), device="cuda", config=config)
    words = words_of(spec)
    first = words.index("--cuda-graph-bs-decode") + 1
    assert words[first : first + 14] == [*map(str, (*range(1, 9), 10, 12, 14, 16, 20)), "--skip-server-warmup"]
    for options in ({"cuda_graph_max_bs_decode": 16}, {"disable_cuda_graph": True}):
        own = replace(spec, config=config.model_copy(update={"sglang": options}))
        assert "--cuda-graph-bs-decode" not in words_of(own)
    prefill = replace(spec, config=config.model_copy(update={"sglang": {"cuda_graph_backend_prefill": "disabled"}}))
    assert "--cuda-graph-bs-decode" in words_of(prefill)


@given(st.integers(1, 5000))
def test_a_batch_is_padded_by_a_quarter_at_most(most: int) -> None:
    sizes = graph_sizes(most)
    assert sizes[-1] == most
    assert all(larger <= max(smaller + 1, 1.25 * smaller) for smaller, larger in pairwise(sizes))


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_no_option_is_set_by_both_megarl_and_a_recipe(device: Device, tmp_path: Path) -> None:
    plain = engine_spec(tmp_path / "model", tmp_path)
    spec = replace(
        plain, device=device, shares_devices=True, num_nodes=2, rendezvous="10.0.0.1:4000", quantization="{}"
    )
    words = words_of(spec)
    own = {word.removeprefix("--").replace("-", "_") for word in words if word.startswith("--")}
    own -= {"config", "cuda_graph_bs_decode"}  # the latter is left out where a recipe names sizes
    assert own <= set(read_library("sglang").fields)
    assert [name for name in own if owned("sglang", name, device=device) is None] == []


@pytest.mark.usefixtures("real_engines")
def test_a_model_folder_without_a_model_is_one_clear_line(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    process = EngineProcess(engine_spec(tmp_path / "empty", tmp_path / "run"))
    process.start()
    with pytest.raises(MachineError) as caught:
        asyncio.run(process.wait_ready())
    message = str(caught.value)
    assert "\n" not in message
    assert message.startswith("engine 0: exited with code 1; last message: 'ValueError: Unrecognized model in ")
    assert str(process.spec.log_path) in message
    assert not wait_until_gone(process.pid, 60)


def test_a_port_in_use_is_reported_before_anything_starts(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(MachineError, match=f"cannot listen on 127.0.0.1:{port}: Address already in use"):
            EngineProcess(engine_spec(tmp_path, tmp_path, port=port))


@pytest.mark.usefixtures("real_engines")
def test_a_server_that_is_late_is_stopped(tmp_path: Path) -> None:
    process = EngineProcess(engine_spec(tmp_path, tmp_path / "run", start_timeout_s=0.5))
    process.start()
    with pytest.raises(MachineError, match=r"engine 0: not ready within 0.5 s \(roles.rollout.start_timeout_s\)"):
        asyncio.run(process.wait_ready())
    assert not wait_until_gone(process.pid, 60)


PARENT = """
import sys, time
from pathlib import Path
from megarl.config.roles import RolloutRoleConfig
from megarl.engine.client import EngineKeys
from megarl.engine.process import EngineProcess, EngineSpec

folder, config = Path(sys.argv[1]), RolloutRoleConfig(pool="rollout")
process = EngineProcess(
    EngineSpec(
        index=0, model_folder=folder, config=config, device="cpu", seed=1, run_folder=folder, keys=EngineKeys.fresh()
    )
)
process.start()
print(process.pid, flush=True)
time.sleep(600)
"""


@pytest.mark.usefixtures("real_engines")
def test_an_engine_does_not_outlive_its_parent(tmp_path: Path) -> None:
    parent = subprocess.Popen([sys.executable, "-c", PARENT, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    group = int(parent.stdout.readline())
    assert group_members(group)
    os.kill(parent.pid, signal.SIGKILL)
    parent.communicate()
    assert not wait_until_gone(group, 60)


@pytest.mark.parametrize(
    "family",
    ["qwen3_moe", *(pytest.param(family, marks=pytest.mark.slow) for family in FAMILIES if family != "qwen3_moe")],
)
@pytest.mark.usefixtures("real_engines")
async def test_an_engine_that_started_with_random_weights_computes_with_those_it_is_given(
    family: str, tmp_path: Path
) -> None:
    """Random weights are in every tensor that is saved with a model; a publish brings parameters, not buffers."""
    engine = family_of(write_tiny_model(tmp_path / "model", family, layers=2, seed=1)).engine
    spec = replace(
        engine_spec(tmp_path / "model", tmp_path / "run"),
        loads_weights=False,
        has_float32_head=True,
        options=engine.cpu_options,
        is_text_alone=engine.is_text_alone,
    )
    process = EngineProcess(spec)
    client = EngineClient(process.endpoint, request_timeout_s=REQUEST_TIMEOUT_S)
    request = GenerateRequest(rid="filled", input_ids=PROMPT, max_new_tokens=6, temperature=0.0)
    process.start()
    try:
        await process.wait_ready()
        before = json.loads((await client.generate(request)).content)
        await admin.load_weights_from_disk(
            client, tmp_path / "model", version=PolicyVersion(0), timeout_s=REQUEST_TIMEOUT_S
        )
        await client.flush_cache()
        after = json.loads((await client.generate(request)).content)
    finally:
        await client.close()
        process.stop()
    expected = greedy_tokens(tmp_path / "model", PROMPT, 6)
    if after["meta_info"]["finish_reason"]["type"] == "stop":
        del expected[expected.index(EOS) + 1 :]
    assert after["output_ids"] == expected
    assert before["output_ids"] != expected
    assert before["meta_info"]["weight_version"] == "none"


@pytest.mark.parametrize(
    ("log", "expected"),
    [
        (["loading", "Traceback (most recent call last):", "ValueError: no such model", "kill_process_tree called"],
         "ValueError: no such model"),
        (["torch.cuda.OutOfMemoryError: CUDA out of memory", "[12:00] Received sigquit from a child process", ""],
         "torch.cuda.OutOfMemoryError: CUDA out of memory"),
        (["[12:00] loading", "[12:01] Segmentation fault", ""], "[12:01] Segmentation fault"),
        ([], "(nothing)"),
    ],
)  # fmt: skip
def test_the_last_message_is_the_reason_not_the_last_line(log: list[str], expected: str) -> None:
    assert last_message(log) == expected


async def test_a_kill_that_is_seen_at_a_worker_first_is_told_as_the_servers(tmp_path: Path) -> None:
    """A real process in the place of the server: it ends a moment after its worker is missed."""
    engine = EngineProcess(engine_spec(tmp_path, tmp_path))
    engine._process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], stdout=subprocess.PIPE)
    engine._workers = frozenset({2**22 + 1})  # no process has this id

    waiting = asyncio.create_task(engine.wait_end())
    await asyncio.sleep(0.05)
    os.kill(engine.pid, signal.SIGKILL)
    os.waitid(os.P_PID, engine.pid, os.WEXITED | os.WNOWAIT)
    try:
        assert "SIGKILL" in (await waiting)
    finally:
        engine._process.kill()
        engine._process.communicate()
        engine._forget_secrets()


QWEN_32B = PUBLIC_MODELS["qwen2.5-32b"]
QWEN_72B = PUBLIC_MODELS["qwen2.5-72b"]


def test_a_long_response_of_a_large_model_has_several_times_the_time_it_needs() -> None:
    rollout = RolloutRoleConfig(pool="all", tensor=4)
    deadlines = deadlines_of(rollout, QWEN_32B, device="cuda", max_response_tokens=20_480)
    # The planner's ideal is 483 s: 23.6 ms a token.
    assert 4 * 483 < deadlines.request_s < 8 * 483
    short = deadlines_of(rollout, QWEN_32B, device="cuda", max_response_tokens=512)
    assert 600 < short.request_s < 700


def test_a_larger_model_may_take_longer_to_start() -> None:
    rollout = RolloutRoleConfig(pool="all", tensor=8)
    small, large = (
        deadlines_of(rollout, shape, device="cuda", max_response_tokens=1024) for shape in (QWEN_32B, QWEN_72B)
    )
    assert 600 < small.start_s < large.start_s < 800


def test_the_recipe_decides_where_it_has_a_deadline() -> None:
    rollout = RolloutRoleConfig(pool="all", start_timeout_s=7, request_timeout_s=9)
    deadlines = deadlines_of(rollout, QWEN_32B, device="cuda", max_response_tokens=20_480)
    assert (deadlines.start_s, deadlines.request_s) == (7, 9)
