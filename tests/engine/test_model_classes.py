"""The model classes that SGLang takes instead of its own, in a process that has imported SGLang."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from megarl.env import engine_environment

PROGRAM = """
import json
from types import SimpleNamespace
from megarl.engine.cpu import install
install()
from megarl.engine.model_classes import heads
sizes = {}
for backend in ("triton", "fa3"):
    kernels = {"attention_backend": "fa3", "prefill_attention_backend": None, "decode_attention_backend": backend}
    heads.get_exec = lambda: SimpleNamespace(kernel=SimpleNamespace(**kernels))
    model = SimpleNamespace(get_attention_sliding_window_size=lambda: 127)
    heads._widen_window(model)
    sizes[backend] = model.get_attention_sliding_window_size()
without = SimpleNamespace()
heads._widen_window(without)
print(json.dumps({"sizes": sizes, "others": list(vars(without))}))
"""


@pytest.mark.slow
@pytest.mark.usefixtures("real_engines")
def test_a_token_sees_its_whole_window_where_triton_decodes() -> None:
    """SGLang passes what a model says to the backend; layers of a prompt have their own number."""
    environment = engine_environment(device="cpu", tensor=1, interface=None, has_own_classes=True)
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=600,
        check=True,
    )
    said = json.loads(done.stdout.splitlines()[-1])
    assert said == {"sizes": {"triton": 128, "fa3": 127}, "others": []}


BROKEN = """
import sys
sys.modules["megarl.engine.model_classes.heads"] = None  # as if a name that it imports were missing
from megarl.engine.cpu import install
install()
import sglang.srt.models.registry
"""


@pytest.mark.slow
@pytest.mark.usefixtures("real_engines")
def test_a_release_without_what_the_classes_need_ends_the_engine() -> None:
    """SGLang would only warn of it, and serve its own classes."""
    environment = engine_environment(device="cpu", tensor=1, interface=None, has_own_classes=True)
    done = subprocess.run(
        [sys.executable, "-c", BROKEN],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 1
    assert "megarl.engine.model_classes.heads" in done.stderr.splitlines()[-1]
