"""Engines that are forked from a template, which has imported SGLang and its stand-ins once for all of them.

The import takes most of an engine's start. Executed engines are those of `test_an_engine_does_not_outlive_its_parent`
and of slow whole runs.
"""

from __future__ import annotations

import importlib
import logging
import pkgutil
import sys
from collections.abc import Callable
from contextlib import suppress

from tests.processes import ForkedCommands, serve_guards

_SERVER = "megarl.engine.cpu"


class EngineTemplate(ForkedCommands):
    """Asks the template at `address` for engines."""

    def __init__(self, address: bytes, refuse: Callable[[str], None] = lambda _: None) -> None:
        super().__init__(address, _SERVER, refuse)


def _import_engine() -> None:
    """Import what a server and its workers import, except for what depends on the environment at that time."""
    logging.disable()  # SGLang names each model that cannot be imported here
    importlib.import_module(_SERVER).install()
    for name in ("sglang.srt.entrypoints.http_server", "sglang.launch_server"):
        importlib.import_module(name)
    models = importlib.import_module("sglang.srt.models")
    for module in pkgutil.iter_modules(models.__path__, f"{models.__name__}."):
        # Some lack a library; SGLang tries them all as well.
        with suppress(Exception):
            importlib.import_module(module.name)
    logging.disable(logging.NOTSET)
    # It reads SGLANG_EXTERNAL_MODEL_PACKAGE.
    del sys.modules["sglang.srt.models.registry"], models.registry
    del sys.modules["sglang.launch_server"]  # the server runs it as its main module


def _run_server() -> int:
    import numpy as np

    from megarl.engine.cpu import start

    np.random.seed()  # all servers would have the template's state
    start()
    return 0


if __name__ == "__main__":
    serve_guards(_SERVER, load=_import_engine, program=_run_server)
