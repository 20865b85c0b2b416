"""One SGLang server as a child of this process: its command line, log, readiness and end, and its deadlines.

Knows the server's options, not its requests. The engine has its own process group and dies with its parent. It reads
its keys from a file, which is removed once the engine is ready; its log never shows them. An engine of several nodes is
one such process on each of them, and only the first one answers requests.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from megarl.config.lora import SERVED_AS
from megarl.config.native import JSON, read_library
from megarl.config.roles import EngineRoleConfig
from megarl.config.section import CPU_CACHED_TOKENS, Device, dtype_on
from megarl.engine.client import EngineClient, EngineEndpoint, EngineKeys, GenerateRequest
from megarl.engine.image_requests import image_words
from megarl.engine.lifecycle import RestartPolicy
from megarl.engine.log import EngineLog
from megarl.env import engine_environment
from megarl.errors import EngineError, MachineError
from megarl.families import family_of
from megarl.families.shape import ModelShape
from megarl.system.guard import SIGNAL_EXIT, remove, segments_of, start_guarded, stop_guarded
from megarl.system.network import LOOPBACK, interface_of, reserve_port
from megarl.system.proc import ProcessStat, all_processes, read_stat
from megarl.weights.algebra.slices import ITEM_BYTES
from megarl.weights.layouts.canonical import num_parameters

LOADER = "megarl.engine.loader.load"
"""The function that SGLang calls with every weight payload."""
DRAFT_LOADER = "megarl.engine.drafts.load"
"""The same with those for the model that drafts."""

_POLL_S = 0.25
_MOST_MEMORY = 0.95
"""Fraction of GPU memory where the KV cache has a fixed size: a limit for weights and cache that never decides it."""
_PORT_TAKEN = re.compile("EADDRINUSE|[Aa]ddress already in use")
_BASE_S = 600.0
"""Imports, compiled kernels and captured graphs at a start; the queue and the prompt of a request."""
_START_S_PER_GB = 1.0
_TOKEN_S = 0.05
_TOKEN_S_PER_GB = 0.004
"""Per GB of weights on one GPU, which every step of decoding reads: 250 GB/s, a tenth of what GPUs reach."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineAdapters:
    """The limits of the adapters that an engine reserves memory for."""

    rank: int
    modules: tuple[str, ...]
    num_loaded: int
    """Versions that are loaded at the same time."""

    @property
    def has_shared_expert(self) -> bool:
        return not set(SERVED_AS.values()).isdisjoint(self.modules)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSpec:
    """The start parameters of one server."""

    index: int
    model_folder: Path
    config: EngineRoleConfig
    device: Device
    seed: int
    run_folder: Path
    """The log is `engines/engine_<index>.log` in it; a frozen model's begins with its role."""
    keys: EngineKeys
    start_timeout_s: float = 600.0
    loads_weights: bool = True
    """False: it starts with random weights, or those of the folder with `images`; a publish must come first."""
    shares_devices: bool = False
    """Whether the engine shares its pool and must be able to release memory."""
    cached_tokens: int | None = None  # size of the KV cache if the recipe has none; None: what is left
    num_nodes: int = 1  # with equal numbers of TP ranks
    node: int = 0  # that of this process, among those of the engine
    rendezvous: str | None = None  # address and port on the first node where the processes of several nodes meet
    adapters: EngineAdapters | None = None  # served beside its base; None: it serves the weights that are published
    has_float32_head: bool = False  # logits stay in float32
    quantization: str | None = None  # fields of config.json for FP8 weights, as JSON
    temperature: float = 1.0  # that of its log-probabilities of given tokens
    returns_routes: bool = False  # replies can have the experts of tokens
    has_windows: bool = False  # in some layers a token sees the last few ones alone
    bind: str | None = None  # `network.bind` of the recipe, from which the starting process derives `host`
    host: str = LOOPBACK
    port: int | None = None  # None: any free port
    role: str = "rollout"  # its key below `roles`
    is_classifier: bool = False  # it returns a number for a sequence, and generates nothing
    has_grammars: bool = False  # it has a tokenizer, and its replies can keep to a JSON schema
    options: tuple[str, ...] = ()  # words of the command line that its family needs
    is_text_alone: bool = False  # the folder has what sees images, and the engine has not
    images: Path | None = None  # the store of the images in requests; None: requests are text alone
    is_dequantized: bool = False  # the folder may have quantized files, and the engine has none

    @property
    def dtype(self) -> str:
        return dtype_on(self.device)

    @property
    def log_path(self) -> Path:
        name, part = self.role.replace("rollout", "engine"), f"_node_{self.node}" if self.node else ""
        return self.run_folder / "engines" / f"{name}_{self.index}{part}.log"

    @property
    def switch_path(self) -> Path:
        """The file that says for which numbers of requests the engine drafts."""
        return self.log_path.with_suffix(".draft.json")

    @property
    def has_saver(self) -> bool:
        """Whether it gives up memory to others on its GPU."""
        return self.shares_devices and self.device == "cuda" and self.config.gives_up_memory

    @property
    def has_own_classes(self) -> bool:
        """Whether SGLang takes our model classes."""
        has_shared_expert = self.adapters is not None and self.adapters.has_shared_expert
        has_kernels = self.has_windows and self.device == "cuda"
        return self.is_classifier or self.temperature != 1 or self.returns_routes or has_shared_expert or has_kernels

    def __str__(self) -> str:
        part = f", node {self.node} of {self.num_nodes}" if self.num_nodes > 1 else ""
        return f"{self.role.replace('rollout', 'engine')} {self.index}{part}"


class PortTakenError(MachineError):
    """Another process took a port after SGLang chose it and before SGLang listened on it."""


class EngineProcess:
    """A server from `start` to `stop`. It listens at `endpoint` once `wait_ready` has returned."""

    def __init__(self, spec: EngineSpec) -> None:
        self.spec = spec
        self._reservation = reserve_port(spec.host, spec.port)
        self.endpoint = EngineEndpoint(
            index=spec.index,
            host=spec.host,
            port=self._reservation.getsockname()[1],
            tensor=spec.config.tensor,
            device=spec.device,
            keys=spec.keys,
        )
        self._log = EngineLog(spec.log_path)
        self._workers: frozenset[int] = frozenset()
        self._process: subprocess.Popen[bytes] | None = None
        self._segments: set[Path] = set()

    def start(self) -> None:
        """Start the process; `wait_ready` waits until it generates."""
        keys = self.spec.keys
        self.spec.log_path.parent.mkdir(parents=True, exist_ok=True)
        _write_private(self._keys_path, f"api-key: {keys.api}\nadmin-api-key: {keys.admin}\n")
        draft = self.spec.config.served_draft
        if draft is not None and draft.kind != "ngram":
            from megarl.engine.drafts import write_switch  # noqa: PLC0415 - few engines have one

            write_switch(draft, self.spec.switch_path)
        server = command_line(self.spec, port=self.endpoint.port, keys_path=self._keys_path)
        self._process = start_guarded(
            server,
            environment=engine_environment(
                device=self.spec.device,
                tensor=self.spec.config.tensor,
                interface=interface_of(self.spec.host),
                shares_devices=self.spec.shares_devices,
                has_own_classes=self.spec.has_own_classes,
                takes_images=self.spec.images is not None,
                has_draft=draft is not None,
            ),
            output=subprocess.PIPE,
        )
        assert self._process.stdout is not None, "its output is a pipe"
        self._log.follow(self._process.stdout)

    async def wait_ready(self) -> None:
        """Wait until it generates. A server that ends or is late is stopped; the error quotes its log."""
        timeout_s = self.spec.start_timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                await self._until_generating()
        except TimeoutError:
            await self._give_up(f"not ready within {timeout_s:g} s (roles.{self.spec.role}.start_timeout_s)")
        except EngineError as error:
            await self._give_up(str(error))
        finally:
            self._forget_secrets()
        self._log.note_start()
        self._workers = frozenset(_workers_in_group(self.pid))
        # After a kill it could no longer be found out which segments are its own.
        self._segments = segments_of(self.pid)

    async def wait_end(self) -> str:
        """Wait until the server or one of its workers is gone; return the reason that the log gives."""
        await _first_end([self.pid, *self._workers])
        # A kill of the whole group may end a worker first: the server gets a moment to end as well.
        await asyncio.sleep(_POLL_S)
        if self.exit_code is None:
            lost = min(pid for pid in self._workers if not _is_worker_of(self.pid, pid))
            return f"its worker process {lost} is gone; {self._log.hint}"
        return self.describe_end()

    async def _until_generating(self) -> None:
        client = EngineClient(self.endpoint, request_timeout_s=self.spec.start_timeout_s)
        try:
            while not await client.is_healthy():
                if self.exit_code is not None:
                    raise EngineError(f"exited with {_describe_exit(self.exit_code)}")
                await asyncio.sleep(_POLL_S)
            if self.spec.node == 0 and self.spec.is_classifier:
                await client.post("ready", "/classify", {"rid": "ready", "input_ids": [0]})
            elif self.spec.node == 0:
                # The first tokens may wait for kernels to be compiled; that is part of the start.
                await client.generate(GenerateRequest(rid="ready", input_ids=(0,), max_new_tokens=2, temperature=0.0))
        finally:
            await client.close()

    async def _give_up(self, reason: str) -> NoReturn:
        await asyncio.to_thread(self.stop)
        kind = PortTakenError if self._log.has(_PORT_TAKEN) else MachineError
        raise kind(f"{self.spec}: {reason}; {self._log.hint}")

    def stop(self) -> None:
        """Kill the server and everything it started. Does nothing if it has ended or was never started."""
        self._forget_secrets()
        if self._process is None:
            return
        # At once: it has nothing to save, and SGLang checks only every 5 s whether it should end.
        stop_guarded(self._process, grace_s=0)
        remove(self._segments)
        self._log.finish()

    @property
    def exit_code(self) -> int | None:
        """None while it is running."""
        return None if self._process is None else self._process.poll()

    @property
    def pid(self) -> int:
        """The id of the guard and of the process group."""
        assert self._process is not None, "start() comes first"
        return self._process.pid

    def describe_end(self) -> str:
        """Return why the server ended, as far as its log shows."""
        how, hint = f"exited with {_describe_exit(self.exit_code)}", self._log.hint
        is_killed = how.endswith(signal.SIGKILL.name)
        return f"{how}, by hand or for lack of memory; log: {self.spec.log_path}" if is_killed else f"{how}; {hint}"

    @property
    def _keys_path(self) -> Path:
        return self.spec.log_path.with_suffix(".keys.yaml")

    def _forget_secrets(self) -> None:
        self._keys_path.unlink(missing_ok=True)
        self._reservation.close()


def command_line(spec: EngineSpec, *, port: int, keys_path: Path) -> list[str]:
    """Return the server's command line. Its keys are in a file: every user can read a command line."""
    config = spec.config
    options: dict[str, str | int | float | Path] = {
        "--model-path": spec.model_folder,
        "--config": keys_path,
        "--host": spec.host,
        "--port": port,
        "--device": spec.device,
        "--dtype": spec.dtype,
        "--tp-size": config.tensor,
        "--ep-size": config.expert,
        "--max-running-requests": config.running_requests,
        "--random-seed": spec.seed % (1 << 31),
        # An answer that no publish preceded is refused by its version.
        "--weight-version": "0" if spec.loads_weights else "none",
        # No publish brings the tower that sees images: it comes from the folder, with text that a publish replaces.
        "--load-format": "auto" if spec.loads_weights or spec.images is not None else "dummy",
        "--log-level-http": "warning",
        **_memory_options(spec),
        **_node_options(spec),
        **({"--quantization": "fp8"} if spec.quantization else {}),
    }
    if spec.device == "cpu":
        options["--attention-backend"] = "torch_native"
        # A prompt that is split would be computed in another order. SGLang records the experts of as many tokens.
        options["--chunked-prefill-size"] = options["--max-total-tokens"] if spec.returns_routes else -1
    else:
        # Other kernels store the experts in an order of their own, which a publish does not know.
        options["--moe-runner-backend"] = "triton"
    # Without sleep-on-idle a waiting engine polls and takes a whole core of the machine that trains.
    # Its own metrics are under /metrics, which needs no key.
    flags = ["--skip-server-warmup", "--sleep-on-idle", "--enable-metrics"]
    flags += ["--constrained-json-disable-any-whitespace"] if spec.has_grammars else ["--skip-tokenizer-init"]
    if config.is_deterministic_on(spec.device):
        # On a CPU the bits of a token depend on how much of its prefix is cached.
        flags += ["--enable-deterministic-inference", *(["--disable-radix-cache"] if spec.device == "cpu" else [])]
    flags += ["--enable-fp32-lm-head"] if spec.has_float32_head else []
    flags += ["--enable-return-routed-experts"] if spec.returns_routes else []
    overrides = _model_overrides(spec)
    flags += ["--json-model-override-args", json.dumps(overrides)] if overrides else []
    if spec.has_saver:
        # Frozen models give up their weights as well, and no publish restores these.
        flags += ["--enable-memory-saver", *([] if spec.role == "rollout" else ["--enable-weights-cpu-backup"])]
    flags += ["--is-embedding"] if spec.is_classifier else []
    words = [str(word) for option in options.items() for word in option]
    words += ["--custom-weight-loader", LOADER, *([] if config.served_draft is None else [DRAFT_LOADER])]
    words += [] if spec.adapters is None else _adapter_words(spec.adapters, spec.device)
    words += [] if spec.device == "cpu" else _graph_words(config)
    words += [] if spec.images is None else image_words(spec.images)
    if config.served_draft is not None:
        from megarl.engine.drafts import draft_words  # noqa: PLC0415 - few engines have one

        words += draft_words(config.served_draft, switch=spec.switch_path, has_saver=spec.has_saver)
    module = "cpu" if spec.device == "cpu" else "server"
    words += [*flags, *spec.options, *_native_words(config.sglang)]
    return [sys.executable, "-m", f"megarl.engine.{module}", *words]


def _model_overrides(spec: EngineSpec) -> dict[str, object]:
    """Return the fields that replace those of config.json: of several such options SGLang takes the last one alone."""
    overrides: dict[str, object] = json.loads(spec.quantization) if spec.quantization else {}
    overrides |= {"quantization_config": None} if spec.is_dequantized and not spec.quantization else {}
    # SGLang's option of this name is for other models.
    overrides |= {"language_model_only": True} if spec.is_text_alone else {}
    overrides |= {"logit_scale": 1 / spec.temperature} if spec.temperature != 1 else {}
    is_adapted = spec.adapters is not None and spec.adapters.has_shared_expert
    return overrides | ({"has_adapted_shared_expert": True} if is_adapted else {})


def _adapter_words(adapters: EngineAdapters, device: Device) -> list[str]:
    """Return the options by which SGLang never unloads an adapter of its own accord: that blocks all loads."""
    options: dict[str, str | int] = {
        "--max-lora-rank": adapters.rank,
        # One slot more: requests without an adapter take one as well.
        "--max-loras-per-batch": adapters.num_loaded + 1,
        "--max-loaded-loras": adapters.num_loaded + 1,
        "--lora-backend": "torch_native" if device == "cpu" else "triton",
    }
    words = [str(word) for option in options.items() for word in option]
    return ["--enable-lora", "--lora-strict-loading", *words, "--lora-target-modules", *adapters.modules]


def _graph_words(config: EngineRoleConfig) -> list[str]:
    """Return the sizes of batches that graphs are captured for, unless the recipe has an option of its own for them.

    Without a graph a small model computes a token many times slower; a graph for each size takes long to capture.
    """
    if any("cuda_graph" in name and "prefill" not in name for name in config.sglang):
        return []
    return ["--cuda-graph-bs-decode", *(str(size) for size in graph_sizes(config.running_requests))]


def graph_sizes(most: int) -> list[int]:
    """Return sizes from 1 to `most`: 1 to 4, then four in each octave. A batch takes the next larger one."""
    sizes = {1, 2, 3, 4, most}
    octave = 4
    while octave < most:
        sizes |= {octave + octave * quarter // 4 for quarter in range(1, 5)}
        octave *= 2
    return sorted(size for size in sizes if size <= most)


def _memory_options(spec: EngineSpec) -> dict[str, str | int | float | Path]:
    config, is_shared_gpu = spec.config, spec.shares_devices and spec.device == "cuda"
    tokens = config.max_cached_tokens or spec.cached_tokens or (CPU_CACHED_TOKENS if spec.device == "cpu" else None)
    # In a shared pool SGLang's fraction would be one of what the trainers have left at this moment.
    fraction = _MOST_MEMORY if is_shared_gpu and tokens is not None else config.memory_fraction
    return {"--mem-fraction-static": fraction, **({} if tokens is None else {"--max-total-tokens": tokens})}


def _node_options(spec: EngineSpec) -> dict[str, str | int | float | Path]:
    if spec.num_nodes == 1:
        return {}
    assert spec.rendezvous is not None, f"{spec}: no rendezvous"
    return {"--nnodes": spec.num_nodes, "--node-rank": spec.node, "--dist-init-addr": spec.rendezvous}


def _native_words(options: Mapping[str, object]) -> list[str]:
    """Return checked options of SGLang as words of its command line, in the recipe's order."""
    fields = read_library("sglang").fields
    words: list[str] = []
    for name, value in options.items():
        field = fields[name]
        flag = field.flag or f"--{name.replace('_', '-')}"
        match value:
            case True:
                words.append(flag)
            case False:
                words += [field.negation] if field.negation else []
            case list() if JSON not in field.types:
                words += [flag, *(str(item) for item in value)]
            case list() | dict():
                words += [flag, json.dumps(value)]
            case _:
                words += [flag, str(value)]
    return words


def _write_private(path: Path, text: str) -> None:
    path.unlink(missing_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(text)


def _describe_exit(code: int | None) -> str:
    number = None if code is None else -code if code < 0 else code - SIGNAL_EXIT
    return signal.Signals(number).name if number in set(signal.Signals) else f"code {code}"


def _workers_in_group(group: int) -> set[int]:
    """Return the ids of the server's own processes, without those that ended but were not reaped."""
    return {process.pid for process in all_processes() if _is_worker(process, group)}


async def _first_end(pids: Iterable[int]) -> None:
    """Return when the first of these processes has ended."""
    ended, loop = asyncio.Event(), asyncio.get_running_loop()
    with ExitStack() as stack:
        for pid in pids:
            try:
                descriptor = os.pidfd_open(pid)
            except ProcessLookupError:
                return
            stack.callback(os.close, descriptor)
            loop.add_reader(descriptor, ended.set)
            stack.callback(loop.remove_reader, descriptor)
        await ended.wait()


def _is_worker_of(group: int, pid: int) -> bool:
    try:
        return _is_worker(read_stat(pid), group)
    except OSError:
        return False


def _is_worker(process: ProcessStat, group: int) -> bool:
    return process.group == group and process.state not in "ZX" and process.name.startswith("sglang::")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineDeadlines:
    start_s: float
    request_s: float


def deadlines_of(
    rollout: EngineRoleConfig, shape: ModelShape, *, device: Device, max_response_tokens: int
) -> EngineDeadlines:
    """Return the recipe's deadlines, and derived ones where it has none; see `EngineRoleConfig`."""
    weights_gb = num_parameters(shape) * ITEM_BYTES[dtype_on(device)] / 1e9
    token_s = _TOKEN_S + _TOKEN_S_PER_GB * weights_gb / rollout.tensor
    return EngineDeadlines(
        start_s=rollout.start_timeout_s or _BASE_S + _START_S_PER_GB * weights_gb,
        request_s=rollout.request_timeout_s or _BASE_S + token_s * max_response_tokens,
    )


def family_options(shape: ModelShape, device: Device) -> tuple[str, ...]:
    """Return the words of the command line that a model's family needs."""
    return family_of(shape).engine.options_on(device)


def serves_text_alone(shape: ModelShape) -> bool:
    """Whether engines leave out what sees images. Not where only the requests have none: without its tower the class of
    Qwen2.5-VL gets no positions."""
    return family_of(shape).engine.is_text_alone


def restart_policy(config: EngineRoleConfig, start_timeout_s: float) -> RestartPolicy:
    return RestartPolicy(
        max_restarts=config.max_restarts,
        back_off_s=config.restart_back_off_s,
        silence_timeout_s=config.silence_timeout_s,
        start_timeout_s=start_timeout_s,
    )
