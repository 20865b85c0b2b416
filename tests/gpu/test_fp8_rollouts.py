"""FP8 weights on SGLang engines: bytes equal to those that SGLang loads from an FP8 folder, times and speed."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from megarl.config.roles import RolloutRoleConfig
from megarl.engine.client import EngineClient, GenerateRequest
from megarl.engine.commands import Rendezvous
from megarl.engine.fleet import Fleet
from megarl.engine.process import EngineProcess
from megarl.engine.tool_commands import ToolControl, _fingerprint
from megarl.families import PUBLIC_MODELS
from megarl.families.shape import Experts, ModelShape
from megarl.types import PolicyVersion
from megarl.weights.algebra.slices import Slice
from megarl.weights.executors.digest import DigestSums, Summand, check_digests
from megarl.weights.executors.fp8 import Fp8Tensors, quantise
from megarl.weights.executors.group import TransferGroup
from megarl.weights.executors.transfer import Sender
from megarl.weights.layouts.canonical import canonical_tensors
from megarl.weights.layouts.fp8 import SCALES, quantization_config
from megarl.weights.layouts.megatron import MegatronParallel, megatron_layout
from megarl.weights.layouts.transfer_spec import TransferSpec
from tests.engine.engines import engine_spec
from tests.weights.digests import digest
from tests.weights.transfer_peers import cut

logger = logging.getLogger(__name__)

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(900)]

TIMEOUT_S = 300.0
NUM_PUBLISHES = 5
NUM_REQUESTS = 64
NUM_TOKENS = 256
PLAIN: dict[str, object] = {"attention_backend": "triton", "sampling_backend": "pytorch", "grammar_backend": "none"}
SLOW: dict[str, object] = {**PLAIN, "disable_cuda_graph": True}
FAST: dict[str, object] = {**PLAIN, "cuda_graph_backend_prefill": "disabled", "cuda_graph_max_bs_decode": 64}
ARCHITECTURES = {
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "llama": "LlamaForCausalLM",
}
LARGE = PUBLIC_MODELS["qwen2.5-7b"]


def small_shape(family: str) -> ModelShape:
    dense = {"qwen2": "qwen2.5-7b", "qwen3": "qwen3-8b", "llama": "llama-3.1-8b"}
    source = PUBLIC_MODELS[dense.get(family, "qwen3-30b-a3b")]
    experts = None if source.experts is None else Experts(num=8, per_token=2, is_normalized=True)
    return replace(
        source, num_layers=3, hidden=512, ffn_hidden=384, num_heads=4, num_kv_heads=2, vocab=4096, experts=experts
    )


def write_config(folder: Path, shape: ModelShape, **more: object) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    width = "moe_intermediate_size" if shape.experts else "intermediate_size"
    config: dict[str, object] = {
        "architectures": [ARCHITECTURES[shape.family]],
        "model_type": shape.family,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.ffn_hidden,
        width: shape.ffn_hidden,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "vocab_size": shape.vocab,
        "max_position_embeddings": 4096,
        "rms_norm_eps": shape.norm_eps,
        "rope_theta": shape.rope_theta,
        "tie_word_embeddings": shape.has_tied_embeddings,
        "hidden_act": "silu",
        "attention_bias": False,
        "torch_dtype": "bfloat16",
        "bos_token_id": 0,
        "eos_token_id": shape.vocab - 1,
        **more,
    }
    if shape.experts is not None:
        config |= {
            "num_experts": shape.experts.num,
            "num_experts_per_tok": shape.experts.per_token,
            "norm_topk_prob": shape.experts.is_normalized,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def random_model(shape: ModelShape, seed: int) -> dict[str, Tensor]:
    generator = torch.Generator(device="cuda").manual_seed(seed)
    return {
        name: torch.randn(spec.shape, generator=generator, device="cuda", dtype=torch.bfloat16)
        * (0.02 if len(spec.shape) > 1 else 0.1)
        + (0 if len(spec.shape) > 1 or name.endswith("bias") else 1)
        for name, spec in canonical_tensors(shape).items()
    }


def obviously_quantised(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Return FP8 elements and scales, block by block as a reader would."""
    rows, columns = matrix.shape
    blocks = matrix.float().view(rows // 128, 128, columns // 128, 128)
    largest = blocks.abs().amax(dim=(1, 3), keepdim=True)
    # torch multiplies by a rounded reciprocal where a CUDA tensor is divided by a number.
    scales = torch.where(largest > 0, largest / torch.full_like(largest, 448.0), torch.ones_like(largest))
    return (blocks / scales).to(torch.float8_e4m3fn).view(rows, columns), scales.view(rows // 128, columns // 128)


def in_fp8(model: Mapping[str, Tensor], canonical: Mapping[str, object]) -> dict[str, Tensor]:
    tensors = dict(model)
    for name in [name for name in model if name + SCALES in canonical]:
        tensors[name], tensors[name + SCALES] = obviously_quantised(model[name])
    return tensors


def test_the_kernel_writes_the_bytes_of_the_formula() -> None:
    for rows, columns, power in ((128, 128, 0), (1024, 640, -9), (4096, 11008, -6)):
        wide = torch.randn(rows, columns + 16, device="cuda") * torch.logspace(-5, 2, rows, device="cuda")[:, None]
        matrix = (wide * 2.0**power).bfloat16()[:, :columns]
        matrix[:128, :128] = 0
        elements = torch.zeros(rows, columns, dtype=torch.float8_e4m3fn, device="cuda")
        scales = torch.zeros(rows // 128, columns // 128, device="cuda")
        quantise(matrix, elements, scales)
        expected, expected_scales = obviously_quantised(matrix)
        assert torch.equal(scales, expected_scales)
        assert torch.equal(elements.view(torch.uint8), expected.view(torch.uint8))
        host = torch.zeros_like(elements, device="cpu"), torch.zeros_like(scales, device="cpu")
        quantise(matrix.cpu(), *host)
        assert torch.equal(host[0].view(torch.uint8), elements.cpu().view(torch.uint8))
        assert torch.equal(host[1], scales.cpu())


def test_digests_of_fp8_and_wider_tensors_are_those_of_the_host_in_one_call() -> None:
    kinds = (torch.float8_e4m3fn, torch.float32, torch.bfloat16)
    tensors = [torch.randn(70 + index, 1536, device="cuda").to(kind) for index, kind in enumerate(kinds)]
    boxes = [Slice(name=f"w{index}", offsets=(3, 16), shape=tuple(each.shape)) for index, each in enumerate(tensors)]
    sums = DigestSums(
        [
            Summand(key=box.name, dtype=each.dtype, box=box, canonical_shape=(4000, 4000))
            for box, each in zip(boxes, tensors, strict=True)
        ]
    )
    copies = [torch.zeros_like(each) for each in tensors]
    found = sums.compute(tensors, copies)
    assert sums._kernel is not None, "the kernel was not used"
    for box, each, copied in zip(boxes, tensors, copies, strict=True):
        assert found[box.name] == digest(each.cpu(), box, (4000, 4000))
        assert torch.equal(copied.view(torch.uint8), each.view(torch.uint8))


@dataclass(frozen=True, kw_only=True)
class PublishTime:
    whole_s: float
    derived_s: float
    """Part of it in which FP8 tensors are derived."""


class OneEngine:
    """An engine, and this process as the only trainer rank on the same card."""

    def __init__(self, shape: ModelShape, client: EngineClient, *, is_fp8: bool, keeps_open: bool) -> None:
        """Without `keeps_open` FP8 tensors are given up between publishes, as in a shared pool."""
        self.client = client
        self.control = ToolControl(Fleet([client], max_outstanding=256, publish_timeout_s=10), timeout_s=TIMEOUT_S)
        self.transfer = TransferSpec(
            shape=shape,
            parallel=MegatronParallel(),
            trainer_dtype="bfloat16",
            num_engines=1,
            tensor=1,
            engine_dtype="bfloat16",
            is_cpu_engine=False,
            shares_devices=True,
            keeps_open=keeps_open,
            fp8_keep=() if is_fp8 else None,
        )
        self._own = megatron_layout(shape, MegatronParallel(), dtype="bfloat16").by_rank[0]
        self._derived: Fp8Tensors | None = None
        self._sender: Sender | None = None
        self._parameters: dict[str, Tensor] = {}

    async def join(self, model: Mapping[str, Tensor]) -> None:
        """Check the engine's parameters, and meet it."""
        transfer = self.transfer
        await self.control.check_layout(transfer)
        plan = transfer.plan()
        rendezvous = Rendezvous(
            address=self.control.address, name="fp8", timeout_s=TIMEOUT_S, backend=None, bucket_bytes=64 << 20
        )
        group, _ = await asyncio.gather(
            asyncio.to_thread(
                TransferGroup.join,
                rendezvous.address,
                name="fp8",
                peer=0,
                num_peers=2,
                timeout_s=TIMEOUT_S,
                backend=None,
            ),
            self.control.join(transfer, plan_hash=plan.hash, rendezvous=rendezvous),
        )
        self._parameters = tensors = cut(self._own, dict(model))
        if transfer.fp8_keep is not None:
            self._derived = Fp8Tensors(plan, 0, self._own, tensors)
            tensors = self._derived.tensors
        self._sender = Sender(plan, 0, tensors, group, direct=transfer.direct, keeps_open=transfer.keeps_open)

    def update(self, model: Mapping[str, Tensor]) -> None:
        """Write other weights into the trainer's memory."""
        for name, tensor in cut(self._own, dict(model)).items():
            self._parameters[name].copy_(tensor)

    async def publish(self, version: int) -> PublishTime:
        assert self._sender is not None, "join comes first"
        torch.cuda.synchronize()
        started = time.monotonic()
        if self._derived is not None:
            self._derived.fill()
            torch.cuda.synchronize()
        derived = time.monotonic()
        sent, arrived = await asyncio.gather(
            asyncio.to_thread(self._sender.send, version), self.control.receive(PolicyVersion(version))
        )
        check_digests([sent], arrived)
        await self.control.confirm(PolicyVersion(version))
        ended = time.monotonic()
        if self._derived is not None and not self.transfer.keeps_open:
            self._derived.free()
        return PublishTime(whole_s=ended - started, derived_s=derived - started)

    async def tokens_per_s(self) -> float:
        async def ask(number: int) -> None:
            request = GenerateRequest(
                rid=f"speed {number}", input_ids=(5, 6, 7 + number), max_new_tokens=NUM_TOKENS, temperature=1.0
            )
            await self.client.generate(request)

        await asyncio.gather(*(ask(number) for number in range(NUM_REQUESTS)))
        started = time.monotonic()
        await asyncio.gather(*(ask(number) for number in range(NUM_REQUESTS, 2 * NUM_REQUESTS)))
        return NUM_REQUESTS * NUM_TOKENS / (time.monotonic() - started)


@asynccontextmanager
async def served(
    folder: Path,
    run: Path,
    shape: ModelShape,
    *,
    quantization: str | None,
    loads: bool,
    sglang: dict[str, object],
    keeps_open: bool = False,
) -> AsyncIterator[OneEngine]:
    config = RolloutRoleConfig(
        pool="gpu", max_cached_tokens=100_000, max_running_requests=NUM_REQUESTS, memory_fraction=0.5, sglang=sglang
    )
    spec = replace(
        engine_spec(folder, run), config=config, device="cuda", loads_weights=loads, quantization=quantization
    )
    process = EngineProcess(spec)
    process.start()
    try:
        await process.wait_ready()
        client = EngineClient(process.endpoint, request_timeout_s=TIMEOUT_S)
        engine = OneEngine(shape, client, is_fp8=quantization is not None or loads, keeps_open=keeps_open)
        try:
            yield engine
        finally:
            await client.close()
    except BaseException:
        logger.exception("tail of %s:\n%s", spec.log_path, "\n".join(spec.log_path.read_text().splitlines()[-60:]))
        raise
    finally:
        process.stop()


def of_weights(fingerprints: Mapping[str, int], *omitted: str) -> dict[str, int]:
    suffixes = ("k_scale", "v_scale", *omitted)
    return {name: value for name, value in fingerprints.items() if not name.endswith(suffixes)}


def expected_fingerprints(engine: OneEngine, model: Mapping[str, Tensor]) -> dict[str, int]:
    target = engine.transfer.plan().target
    tensors = cut(target.by_rank[0], in_fp8(model, target.canonical))
    return of_weights({name: _fingerprint(tensor) for name, tensor in tensors.items()})


def check_same(found: Mapping[str, int], expected: Mapping[str, int]) -> None:
    assert found.keys() == expected.keys(), sorted(found.keys() ^ expected.keys())[:10]
    different = [name for name in found if found[name] != expected[name]]
    assert not different, f"{len(different)} of {len(found)} differ: {different[:10]}"


@pytest.mark.parametrize("family", ["qwen3_moe", "qwen2", "qwen3", "llama"])
def test_a_published_engine_has_the_bytes_that_sglang_loads_from_an_fp8_folder(family: str, tmp_path: Path) -> None:
    shape, model = small_shape(family), random_model(small_shape(family), 2)
    quantization = quantization_config(shape, ())
    assert quantization is not None
    plain = write_config(tmp_path / "plain", shape)

    async def scenario() -> None:
        async with served(plain, tmp_path / "a", shape, quantization=quantization, loads=False, sglang=SLOW) as engine:
            await engine.join(random_model(shape, 1))
            await engine.publish(1)
            engine.update(model)
            await engine.publish(2)
            (published,) = await engine.control.fingerprints()
            check_same(of_weights(published), expected_fingerprints(engine, model))
            canonical = engine.transfer.plan().target.canonical
        folder = write_config(tmp_path / "fp8", shape, **json.loads(quantization))
        values = in_fp8(model, canonical)
        save_file({name: tensor.cpu().contiguous() for name, tensor in values.items()}, folder / "model.safetensors")
        async with served(folder, tmp_path / "b", shape, quantization=None, loads=True, sglang=SLOW) as engine:
            (loaded,) = await engine.control.fingerprints()
        # SGLang's Llama leaves the scales of an FP8 folder unread: it looks for them under another name.
        omitted = (SCALES,) if family == "llama" else ()
        check_same(of_weights(published, *omitted), of_weights(loaded, *omitted))
        logger.info("%s: %d parameters equal to SGLang's own", family, len(loaded))

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("precision", "keeps_open"),
    [
        pytest.param("bf16", True, id="bf16"),
        pytest.param("fp8", True, id="fp8_separate"),
        pytest.param("fp8", False, id="fp8_shared"),
    ],
)
def test_publish_and_speed_of_the_7b_shape(precision: str, keeps_open: bool, tmp_path: Path) -> None:
    """Logs the figures that docs/performance.md compares."""
    folder, model = write_config(tmp_path / "7b", LARGE), random_model(LARGE, 1)
    quantization = quantization_config(LARGE, ()) if precision == "fp8" else None

    async def measure() -> None:
        async with served(
            folder,
            tmp_path / precision,
            LARGE,
            quantization=quantization,
            loads=False,
            sglang=FAST,
            keeps_open=keeps_open,
        ) as engine:
            await engine.join(model)
            first = await engine.publish(1)
            times = [await engine.publish(version) for version in range(2, 2 + NUM_PUBLISHES)]
            if quantization is not None:
                (published,) = await engine.control.fingerprints()
                check_same(of_weights(published), expected_fingerprints(engine, model))
                logger.info("7B: %d parameters equal to the formula's", len(published))
            whole, derived = median(each.whole_s for each in times), median(each.derived_s for each in times)
            num_bytes = sum(engine.transfer.plan().traffic.received_bytes.values())
            logger.info(
                "%s, %s: %.2f GB; publish %.1f ms (first %.1f), %.1f ms of them derive; %.0f tokens/s at %d requests",
                *(
                    precision,
                    "kept open" if keeps_open else "opened each time",
                    num_bytes / 1e9,
                    1e3 * whole,
                    1e3 * first.whole_s,
                    1e3 * derived,
                ),
                *(await engine.tokens_per_s(), NUM_REQUESTS),
            )

    asyncio.run(measure())
