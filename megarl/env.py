"""Every environment variable that megarl reads or sets, with its reason. Read nowhere else; they carry no state."""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvVar:
    name: str
    default: str
    reason: str

    def read(self) -> str:
        return os.environ.get(self.name, self.default)

    @property
    def is_set(self) -> bool:
        return self.name in os.environ

    def set(self, value: str) -> None:
        """Set it for the libraries of this process."""
        os.environ[self.name] = value


def current_environment() -> Mapping[str, str]:
    """Return the variables of this process, for a child that inherits them."""
    return os.environ


def program_environment() -> dict[str, str]:
    """Return the variables that change what a process of a run does, as far as their names tell."""
    return {name: value for name, value in os.environ.items() if name.startswith(_OF_PROGRAMS) and name != FAULTS.name}


def update_environment(variables: Mapping[str, str]) -> None:
    """Set variables for the libraries of this process and for its children."""
    os.environ.update(variables)


RAY_ADDRESS = EnvVar(name="RAY_ADDRESS", default="", reason="Join this Ray cluster when the recipe names none.")
NO_COLOR = EnvVar(name="NO_COLOR", default="", reason="Any value: plain output, as with other tools.")
FAULTS = EnvVar(name="MEGARL_FAULTS", default="", reason="Faults for tests, as JSON; see system/faults.py.")
USER_WORKER = EnvVar(
    name="MEGARL_USER_WORKER",
    default="",
    reason="Marks a process that runs a user's code, such as a reward worker, and all that it starts.",
)
USER_PROGRAM = EnvVar(
    name="MEGARL_USER_PROGRAM",
    default="",
    reason="Marks a program that is the agent of an episode, and all that it starts.",
)
ONE_CARD = EnvVar(
    name="MEGARL_ONE_CARD",
    default="",
    reason="Any value: all GPUs of the run are the first one of this machine, to rehearse a cluster on a single GPU.",
)
COMMIT = EnvVar(
    name="MEGARL_COMMIT", default="", reason="Set in the image: the commit it was built from, which has no checkout."
)
LOADED_MODULES = EnvVar(name="LOADEDMODULES", default="", reason="The modules that `module load` has loaded.")
VISIBLE_GPUS = EnvVar(name="CUDA_VISIBLE_DEVICES", default="", reason="The GPUs of a process; all if it is not set.")
SLURM_JOB_ID = EnvVar(name="SLURM_JOB_ID", default="", reason="Set inside a Slurm job.")
SLURM_CPUS_ON_NODE = EnvVar(
    name="SLURM_CPUS_ON_NODE", default="", reason="The job's cores on this node; Ray would count every core."
)

_OF_PROGRAMS = (
    "CUDA_",
    "GLOO_",
    "LD_",
    "MEGARL_",
    "MKL_",
    "NCCL_",
    "NVTE_",
    "OMP_",
    "PYTHON",
    "SGLANG_",
    "TORCH",
    "TRITON_",
)
"""Beginnings of the names of such variables."""

NCCL_DEBUG = EnvVar(
    name="NCCL_DEBUG",
    default="WARN",
    reason="Set for trainer ranks and engines unless it is set: NCCL prints nothing otherwise, not even its errors.",
)

NCCL_MEMORY = EnvVar(
    name="NCCL_CUMEM_ENABLE",
    default="0",
    reason="Set for trainer ranks and engines unless it is set: peers of a publish must agree, and SGLang's default "
    "differs from NCCL's.",
)

NCCL_SWITCH = EnvVar(
    name="NCCL_NVLS_ENABLE",
    default="0",
    reason="Set likewise: reductions in NVLink's switches take device memory per communicator; SGLang leaves them out.",
)

NCCL_VARIABLES = (NCCL_DEBUG, NCCL_MEMORY, NCCL_SWITCH)
"""Variables that trainer ranks and engines set alike."""

FLIGHT_RECORDER = EnvVar(
    name="TORCH_FR_BUFFER_SIZE",
    default="2000",
    reason="Set for trainer ranks unless it is set: the last collectives of a rank, from which a hang is explained.",
)

TRANSFORMERS_ADVICE = EnvVar(
    name="TRANSFORMERS_NO_ADVISORY_WARNINGS",
    default="1",
    reason="Set for processes that only tokenise: they do without torch, and transformers would say so in each.",
)

ENGINE_HOST_ENVIRONMENT: Mapping[str, str] = {
    # Ray would kill an actor's children one by one as the actor ends, the engine's guard before the engine.
    "RAY_kill_child_processes_on_worker_exit": "false",
}
"""Variables that Ray adds to the environment of the process that starts an engine."""

ENGINE_ENVIRONMENT: Mapping[str, str] = {
    # A paused engine answers 503 to a health check that generates; a static check shows whether the process lives.
    "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0",
    # Callers close idle connections, never the engine: a request could be on its way.
    "SGLANG_TIMEOUT_KEEP_ALIVE": "3600",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
"""Variables of every SGLang process."""

CPU_ENGINE_ENVIRONMENT: Mapping[str, str] = {
    "SGLANG_USE_CPU_ENGINE": "1",
    # The inputs of short convolutions, which SGLang keeps in bfloat16 whatever the model's dtype.
    "SGLANG_MAMBA_CONV_DTYPE": "float32",
    # One thread per rank: results do not depend on the number of cores.
    "OMP_NUM_THREADS": "1",
    # Compiling two helper functions delays the first request by half a minute, and needs a C++ compiler.
    "TORCHDYNAMO_DISABLE": "1",
}
"""Further variables of an SGLang process without a GPU."""

MODEL_CLASSES_ENVIRONMENT: Mapping[str, str] = {
    # Model classes that replace those of SGLang: see `engine.model_classes.heads`.
    "SGLANG_EXTERNAL_MODEL_PACKAGE": "megarl.engine.model_classes",
}
"""Further variables of an SGLang process that serves a sequence classifier, scores at a temperature, records experts,
or has windows on a GPU."""

PLAIN_CLASSES_ENVIRONMENT: Mapping[str, str] = {
    # SGLang's own class of the model, without the import of all others.
    "SGLANG_EXTERNAL_MODEL_PACKAGE": "megarl.engine.plain_classes",
}
"""Further variables of every other SGLang process."""

DRAFT_ENVIRONMENT: Mapping[str, str] = {
    # Heads are often trained on short texts: past their context they draft worse, and no token is wrong.
    "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1",
}
"""Further variables of an SGLang process with a draft."""

IMAGE_PROCESSORS = EnvVar(
    name="SGLANG_EXTERNAL_MM_PROCESSOR_PACKAGE",
    default="",
    reason="Set for engines that take images: the package whose processors replace those of SGLang.",
)

SHARED_ENGINE_ENVIRONMENT: Mapping[str, str] = {
    # SGLang would refuse GPUs of which one has less free memory, because a trainer has not left it yet.
    "SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK": "0",
}
"""Further variables of an SGLang process that shares its GPUs with trainers."""


KERNEL_CACHES: Mapping[str, str] = {
    "TRITON_CACHE_DIR": "triton",
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "TORCH_EXTENSIONS_DIR": "torch_extensions",
    "FLASHINFER_WORKSPACE_BASE": "flashinfer",
    # SGLang puts those of DeepGEMM below it.
    "SGLANG_CACHE_DIR": "sglang",
    "TILELANG_CACHE_DIR": "tilelang",
    "TVM_FFI_CACHE_DIR": "tvm_ffi",
    "CUDA_CACHE_PATH": "cuda",
}
"""Variables of every process with a GPU, with the folder of each in `kernel_caches`."""


def kernel_caches() -> dict[str, str]:
    """Return the variables that put compiled kernels on this node's own disk; those that are set stay as they are.

    Their defaults are in the home folder, which nodes share: hundreds of processes would compile into it at once. The
    folder stays for the next run. One that belongs to somebody else is not used: what is in it is run.
    """
    folder = Path(tempfile.gettempdir()) / f"megarl-kernels-{os.getuid()}"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        status = folder.lstat()
    except OSError:
        return {}
    if status.st_uid != os.getuid() or not stat.S_ISDIR(status.st_mode) or status.st_mode & 0o022:
        return {}
    return {name: str(folder / inner) for name, inner in KERNEL_CACHES.items() if name not in os.environ}


def agent_store(address: str) -> dict[str, str]:
    """Return the variables by which the ranks of an engine meet at a store that another process hosts."""
    return {"TORCHELASTIC_USE_AGENT_STORE": "True", "SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE": f"tcp://{address}"}


GLOO_INTERFACE = EnvVar(
    name="GLOO_SOCKET_IFNAME",
    default="",
    reason="Set for trainer ranks and engines: gloo would listen on the interface that the host's name resolves to.",
)

NCCL_INTERFACE = EnvVar(
    name="NCCL_SOCKET_IFNAME",
    default="",
    reason="Set likewise unless it is set: NCCL would choose among several by itself, differently on each node.",
)


def nccl_interface(interface: str) -> dict[str, str]:
    """Return the variable that makes NCCL connect over one interface, whose name is not a beginning of others."""
    return {} if NCCL_INTERFACE.is_set else {NCCL_INTERFACE.name: f"={interface}"}


def nccl_log(path: Path) -> dict[str, str]:
    """Return the variables that make NCCL write what it connects, and over which network, to a file."""
    return {NCCL_DEBUG.name: "INFO", "NCCL_DEBUG_SUBSYS": "INIT,NET", "NCCL_DEBUG_FILE": str(path)}


def engine_environment(
    *,
    device: str,
    tensor: int,
    interface: str | None,
    shares_devices: bool = False,
    has_own_classes: bool = False,
    takes_images: bool = False,
    has_draft: bool = False,
) -> dict[str, str]:
    """Return all variables of one engine's process: this process's, then ours. `interface` has the engine's address."""
    environment = {
        **{variable.name: variable.default for variable in NCCL_VARIABLES},
        **os.environ,
        **ENGINE_ENVIRONMENT,
        **(SHARED_ENGINE_ENVIRONMENT if shares_devices else {}),
    }
    if interface is not None:
        environment |= {GLOO_INTERFACE.name: interface, **nccl_interface(interface)}
    environment |= MODEL_CLASSES_ENVIRONMENT if has_own_classes else PLAIN_CLASSES_ENVIRONMENT
    if has_draft:
        environment |= DRAFT_ENVIRONMENT
    if takes_images:
        environment[IMAGE_PROCESSORS.name] = "megarl.engine.image_processors"
    if device == "cuda":
        environment |= kernel_caches()
    if device == "cpu":
        environment |= CPU_ENGINE_ENVIRONMENT
        # SGLang requires a core per rank here; without its compiled kernels it binds none of them.
        environment["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(str(rank) for rank in range(tensor))
    return environment


TRAINER_ENVIRONMENT: Mapping[str, str] = {"CUDA_DEVICE_MAX_CONNECTIONS": "1", "HF_HUB_OFFLINE": "1"}
"""Variables of every trainer rank. One connection: Megatron's overlap of communication relies on launch order."""

CPU_TRAINER_ENVIRONMENT: Mapping[str, str] = {"OMP_NUM_THREADS": "1"}


def trainer_environment(device: str) -> dict[str, str]:
    """Return the variables that Ray adds to the environment of a trainer rank."""
    return {**TRAINER_ENVIRONMENT, **(CPU_TRAINER_ENVIRONMENT if device == "cpu" else {})}


RAY_ENVIRONMENT: Mapping[str, str] = {
    "RAY_AUTH_MODE": "token",
    "RAY_USAGE_STATS_ENABLED": "0",
    # Workers that hold no GPU keep the variables they were given.
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    # Ray would print a paragraph about a failure that megarl reports in one sentence.
    "RAY_DEDUP_LOGS_SKIP_REGEX": "^A worker died or was killed while executing a task",
}
"""Set for every Ray that megarl uses: token auth, no usage statistics. Ray reads these when it is imported."""

LOCAL_RAY_ENVIRONMENT: Mapping[str, str] = {
    # Named for other systems, but on Linux too it makes Ray use 127.0.0.1 as its address and listen on nothing else.
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    # Seconds: a head that is gone does not come back, but one on a busy machine may be late.
    "RAY_gcs_rpc_server_reconnect_timeout_s": "20",
    # Ray would start a process per core in advance, which an actor with variables of its own cannot use.
    "RAY_prestart_worker_first_driver": "false",
}
"""Set as well for a Ray that megarl starts on this machine alone."""

SEVERAL_NODES_ENVIRONMENT: Mapping[str, str] = {
    # Ray refuses to start a further node otherwise.
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "1",
}
"""Set for every node of a Ray of several nodes on this machine."""

NO_TOKEN_ENVIRONMENT: Mapping[str, str] = {"RAY_AUTH_MODE": "disabled"}
"""Set as well for a Ray cluster that was started without a token, where the recipe allows it."""

RAY_AUTH_TOKEN_PATH = EnvVar(
    name="RAY_AUTH_TOKEN_PATH",
    default="",
    reason="The file with the cluster's token; a file, so that it is in no argv.",
)
RAY_AUTH_TOKEN = EnvVar(name="RAY_AUTH_TOKEN", default="", reason="The token itself, where a system passes it so.")


def visible_gpus(gpus: Sequence[str]) -> dict[str, str]:
    """Return the variables that make these GPUs visible to a process, instead of the one Ray would choose."""
    named = {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1", "CUDA_VISIBLE_DEVICES": ",".join(gpus)}
    return {**named, "CUDA_VISIBLE_DEVICES": "0", **own_host()} if ONE_CARD.read() else named


def own_host() -> dict[str, str]:
    """Return the variables that make a process a host of its own to NCCL, which refuses two of a host on one GPU."""
    return {"NCCL_HOSTID": uuid4().hex, "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}
