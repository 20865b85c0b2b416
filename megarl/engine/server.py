"""Starts released SGLang with the replies of `server_replies`: `python -m megarl.engine.server <its arguments>`.

Hooks of its plugin registry let requests into a batch in company (`prefills`), and a paused scheduler on a CPU wait:
SGLang's loop polls without a pause then, and takes a core of the machine that trains for each rank of an engine. (On a
GPU the workers are spawned, and have hooks for draws and drafts instead of the latter.)

Two doors are closed before SGLang starts. The store at which the ranks of an engine meet would listen on all
interfaces: this process hosts it, on one address, and torch's setting for agents makes every rank a client.
`/server_info` would show the admin key to holders of the API key: both are masked in all replies to GET.
"""

from __future__ import annotations

import runpy
import socket
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import yaml

from megarl.engine import prefills
from megarl.engine.server_loads import DirectLoads
from megarl.engine.server_replies import DirectGeneration, MaskedReplies, add_flat_logprobs
from megarl.env import IMAGE_PROCESSORS, ONE_CARD, agent_store, own_host, update_environment
from megarl.system.imports import uncollected
from megarl.system.network import LOOPBACK

if ONE_CARD.read():
    # SGLang imports the main module in each process that it spawns.
    update_environment(own_host())

DRAFT_OPTION = "--speculative-algorithm"
_UNUSED = ("mcp", "megatron")
"""Packages of other roles, which SGLang imports where it finds them, for tools and dumps that no engine has here."""
_PAUSED_LOOP = "sglang.srt.managers.scheduler.Scheduler._record_scheduler_state_for_paused_engine"
"""Called in each iteration of the loop of a paused scheduler."""
_PAUSED_POLL_S = 0.005
_PROCESSOR = "sglang.srt.managers.tokenizer_manager.get_processor_wrapper"
_TARGET = "sglang.srt.managers.tokenizer_manager.TokenizerManager.add_logprob_to_meta_info"


def register() -> None:
    """Register the hooks; the server applies them when it loads its plugins, before it starts."""
    try:
        from sglang.srt.plugins.hook_registry import HookRegistry, HookType  # noqa: PLC0415 - only in the server
    except ImportError:
        return  # an older release, whose replies have lists
    HookRegistry.register(_TARGET, add_flat_logprobs, HookType.AROUND)
    HookRegistry.register(_PAUSED_LOOP, wait_while_paused, HookType.AROUND)
    prefills.register_hook()
    if IMAGE_PROCESSORS.read():
        HookRegistry.register(_PROCESSOR, no_processor, HookType.AROUND)


def wait_while_paused(record: Callable[[object], None], scheduler: object) -> None:
    """Give the core away for a moment."""
    record(scheduler)
    time.sleep(_PAUSED_POLL_S)


def no_processor(_: Callable[[], object]) -> None:
    """Make no processor of transformers: images come processed, and some need packages that are not here."""


def host_store(arguments: Sequence[str]) -> object:
    """Host the store of this engine's ranks and direct them to it; the store lives as long as what is returned."""
    # torch takes seconds to import, and only the server needs it.
    from torch.distributed import TCPStore  # noqa: PLC0415

    named = _value_of("--dist-init-addr", arguments)
    if named is not None and _value_of("--node-rank", arguments) not in (None, "0"):
        update_environment(agent_store(named))
        return None
    host, _, port = (named or f"{LOOPBACK}:0").rpartition(":")
    listener = socket.create_server((host, int(port)))
    port_number = listener.getsockname()[1]
    update_environment(agent_store(f"{host}:{port_number}"))
    return TCPStore(host, port_number, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())


def _value_of(option: str, arguments: Sequence[str]) -> str | None:
    return arguments[arguments.index(option) + 1] if option in arguments else None


def guard_doors(arguments: Sequence[str]) -> None:
    """Mask the keys of the file that the arguments name, and let those who have them in; the file does not stay."""
    path = _value_of("--config", arguments)
    if path is not None:
        from sglang.srt.entrypoints.http_server import app  # noqa: PLC0415 - only in the server

        keys = yaml.safe_load(Path(path).read_text())
        secrets = [str(keys[name]).encode() for name in ("api-key", "admin-api-key")]
        app.add_middleware(MaskedReplies, secrets=secrets)
        build = app.build_middleware_stack
        api, admin = secrets
        app.build_middleware_stack = lambda: DirectLoads(DirectGeneration(build(), key=api), key=admin)


def hide_unused() -> None:
    """Let SGLang do without packages that only cost its processes seconds of their start."""
    for name in _UNUSED:
        sys.modules.setdefault(name, None)  # type: ignore[arg-type]


def prepare_worker(arguments: Sequence[str]) -> None:
    """Register the hooks of a scheduler, in a process that the server spawned: it applies them with its plugins."""
    from megarl.engine import sampling  # noqa: PLC0415 - only in a worker, which has torch

    hide_unused()
    sampling.register_hook()
    prefills.register_hook()
    if DRAFT_OPTION in arguments:
        from megarl.engine.drafts import register_hooks  # noqa: PLC0415 - few engines have a draft

        register_hooks(arguments)


def run() -> None:
    """Run SGLang's own server with the hooks, its store and its keys behind closed doors."""
    hide_unused()
    with uncollected():
        register()
        store = host_store(sys.argv)
        guard_doors(sys.argv)
    sys.argv[0] = "sglang.launch_server"
    runpy.run_module("sglang.launch_server", run_name="__main__")
    del store


if __name__ == "__mp_main__":
    prepare_worker(sys.argv)
if __name__ == "__main__":
    run()
