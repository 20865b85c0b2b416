"""One SGLang server as a child of this process: its command line, log, readiness and end.

Knows the server's options, not what it is asked to generate. The engine lives in a process group of its own and dies
with its parent; its keys reach it through a file that is gone once it is ready, and its log never shows them.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Literal

from megarl.config.recipe import RolloutRoleConfig
from megarl.env import engine_environment
from megarl.errors import EngineError, EnvironmentProblem
from megarl.rollout.client import EngineClient, EngineEndpoint, EngineKeys, GenerateRequest

LOOPBACK = "127.0.0.1"
LOADER = "megarl.rollout.loader.load"
"""What SGLang calls with every weight payload."""

_CPU_CACHED_TOKENS = 32_768
_POLL_S = 0.25
_STOP_GRACE_S = 15.0
_NUM_TAIL_LINES = 400
_PR_SET_PDEATHSIG = 1

_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSpec:
    """What one server is started with."""

    index: int
    model_folder: Path
    config: RolloutRoleConfig
    device: Literal["cpu", "cuda"]
    seed: int
    run_folder: Path
    """Gets `engines/engine_<index>.log`."""
    keys: EngineKeys
    can_sleep: bool = False
    """Whether a GPU engine shares its pool and has to give memory back."""
    host: str = LOOPBACK
    port: int | None = None
    """Without it any free one."""

    @property
    def dtype(self) -> str:
        return "float32" if self.device == "cpu" else "bfloat16"

    @property
    def log_path(self) -> Path:
        return self.run_folder / "engines" / f"engine_{self.index}.log"


class EngineProcess:
    """From `start` to `stop`. `endpoint` is where it listens once `wait_ready` has returned."""

    def __init__(self, spec: EngineSpec) -> None:
        self.spec = spec
        self._reservation = _reserve_port(spec.host, spec.port)
        self.endpoint = EngineEndpoint(
            index=spec.index,
            host=spec.host,
            port=self._reservation.getsockname()[1],
            tensor=spec.config.tensor,
            device=spec.device,
            keys=spec.keys,
        )
        self._tail: deque[str] = deque(maxlen=_NUM_TAIL_LINES)
        self._spawned = threading.Event()
        self._spawn_error: OSError | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._keeper = threading.Thread(target=self._keep, name=f"engine-{spec.index}", daemon=True)

    def start(self) -> None:
        """Begin to start; `wait_ready` says when it has."""
        self.spec.log_path.parent.mkdir(parents=True, exist_ok=True)
        _write_private(self._keys_path, f"api-key: {self.spec.keys.api}\nadmin-api-key: {self.spec.keys.admin}\n")
        self._keeper.start()
        self._spawned.wait()
        if self._spawn_error is not None:
            self._forget_secrets()
            raise EnvironmentProblem(f"engine {self.spec.index}: cannot start {sys.executable}: {self._spawn_error}")

    async def wait_ready(self) -> None:
        """Until it generates; a server that ends or is late is stopped, and the error quotes its log."""
        timeout_s = self.spec.config.start_timeout_s
        client = EngineClient(self.endpoint, request_timeout_s=timeout_s)
        try:
            async with asyncio.timeout(timeout_s):
                while not await client.is_healthy():
                    self._raise_if_ended()
                    await asyncio.sleep(_POLL_S)
                # The first tokens may have to wait for kernels to be compiled; no run should be charged for that.
                await client.generate(GenerateRequest(rid="ready", input_ids=(0,), max_new_tokens=2, temperature=0.0))
        except TimeoutError:
            await asyncio.to_thread(self.stop)
            raise EnvironmentProblem(
                f"engine {self.spec.index}: not ready within {timeout_s:.0f} s (roles.rollout.start_timeout_s); "
                f"{self._log_hint()}"
            ) from None
        except EngineError as error:
            await asyncio.to_thread(self.stop)
            raise EnvironmentProblem(f"{error}; {self._log_hint()}") from error
        except EnvironmentProblem:
            await asyncio.to_thread(self.stop)
            raise
        finally:
            self._forget_secrets()
            await client.close()

    def stop(self) -> None:
        """End it and everything it started. Harmless when it has ended or never began."""
        self._forget_secrets()
        if self._process is None:
            return
        # Only the server itself: it takes a worker that ends before it for a crash and stays to diagnose it.
        self._process.terminate()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=_STOP_GRACE_S)
        # Children may outlive it, whether it left in order or not.
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(timeout=_STOP_GRACE_S)
        self._keeper.join(timeout=_STOP_GRACE_S)

    @property
    def exit_code(self) -> int | None:
        """None while it is running."""
        return None if self._process is None else self._process.poll()

    @property
    def pid(self) -> int:
        """Of the server, and of its process group."""
        assert self._process is not None, "start() comes first"
        return self._process.pid

    def describe_end(self) -> str:
        """Why a server that is no longer there ended, as far as its log tells."""
        return f"exited with {_describe_exit(self.exit_code)}; {self._log_hint()}"

    @property
    def _keys_path(self) -> Path:
        return self.spec.log_path.with_suffix(".keys.yaml")

    def _keep(self) -> None:
        """Start the server, then copy its output to the log until the last process that writes there is gone.

        One thread does both: Linux ties the death signal to the thread that forked, not to the process.
        """
        spec = self.spec
        try:
            # A relative path in the recipe means the same in the engine: it starts in this process's folder.
            process = subprocess.Popen(  # noqa: S603 - our own command line
                command_line(spec, port=self.endpoint.port, keys_path=self._keys_path),
                env=engine_environment(device=spec.device, tensor=spec.config.tensor),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=_die_with_parent,
            )
        except OSError as error:
            self._spawn_error = error
            self._spawned.set()
            return
        self._process = process
        self._spawned.set()
        assert process.stdout is not None
        with spec.log_path.open("w", encoding="utf-8") as log:
            self._copy(process.stdout, log)

    def _copy(self, output: IO[bytes], log: IO[str]) -> None:
        for raw in output:
            line = raw.decode("utf-8", errors="replace")
            for secret in (self.spec.keys.api, self.spec.keys.admin):
                line = line.replace(secret, "***")
            log.write(line)
            log.flush()
            self._tail.append(line.rstrip())

    def _raise_if_ended(self) -> None:
        if self.exit_code is None:
            return
        self._keeper.join(timeout=_POLL_S * 20)  # the last lines may still be on their way
        raise EnvironmentProblem(f"engine {self.spec.index}: {self.describe_end()}")

    def _log_hint(self) -> str:
        return f"last words: {last_words(self._tail)!r}; log: {self.spec.log_path}"

    def _forget_secrets(self) -> None:
        self._keys_path.unlink(missing_ok=True)
        self._reservation.close()


def command_line(spec: EngineSpec, *, port: int, keys_path: Path) -> list[str]:
    """The server's options. Its keys are in a file: everyone on the machine can read a command line."""
    config = spec.config
    module = "megarl.rollout.cpu" if spec.device == "cpu" else "sglang.launch_server"
    options: dict[str, str | int | float | Path] = {
        "--model-path": spec.model_folder,
        "--config": keys_path,
        "--host": spec.host,
        "--port": port,
        "--device": spec.device,
        "--dtype": spec.dtype,
        "--tp-size": config.tensor,
        "--max-running-requests": config.max_running_requests,
        "--mem-fraction-static": config.memory_fraction,
        "--random-seed": spec.seed % (1 << 31),
        "--weight-version": "0",
        "--custom-weight-loader": LOADER,
        "--log-level-http": "warning",
    }
    cached_tokens = config.max_cached_tokens
    if spec.device == "cpu":
        options["--attention-backend"] = "torch_native"
        # A prompt that is cut where the batch is full would be computed in another order than a whole one.
        options["--chunked-prefill-size"] = -1
        cached_tokens = cached_tokens or _CPU_CACHED_TOKENS
    if cached_tokens is not None:
        options["--max-total-tokens"] = cached_tokens
    flags = ["--skip-tokenizer-init", "--skip-server-warmup"]
    if config.is_deterministic:
        flags.append("--enable-deterministic-inference")
    if spec.can_sleep and spec.device == "cuda":
        flags.append("--enable-memory-saver")
    return [sys.executable, "-m", module, *(str(word) for option in options.items() for word in option), *flags]


_EXCEPTION = re.compile(r"^[\w.]*(Error|Exception|Interrupt|Exit)\b.*: \S")
_NOISE = re.compile(r"Received sigquit|kill_process_tree|^\s*$")


def last_words(lines: Iterable[str]) -> str:
    """The line of a log that says why: the last exception, else the last line that says anything."""
    meaningful = [line.strip() for line in lines if not _NOISE.search(line)]
    exceptions = [line for line in meaningful if _EXCEPTION.match(line)]
    chosen = exceptions or meaningful
    return chosen[-1][:500] if chosen else "(nothing)"


def _reserve_port(host: str, port: int | None) -> socket.socket:
    """A bound socket that nobody listens on: no one else is given the port, yet the server can still take it."""
    reservation = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    reservation.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        reservation.bind((host, port or 0))
    except OSError as error:
        reservation.close()
        raise EnvironmentProblem(
            f"cannot listen on {host}:{port or 'any port'}: {error.strerror}; choose another port"
        ) from error
    return reservation


def _write_private(path: Path, text: str) -> None:
    path.unlink(missing_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(text)


def _die_with_parent() -> None:
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _describe_exit(code: int | None) -> str:
    if code is not None and code < 0:
        return signal.Signals(-code).name
    return f"code {code}"
