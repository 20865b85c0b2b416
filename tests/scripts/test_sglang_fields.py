from __future__ import annotations

import subprocess
import sys
from importlib.resources import files

import pytest


@pytest.mark.usefixtures("real_engines")
def test_the_data_file_is_what_the_installed_sglang_takes() -> None:
    """In a process of its own: importing SGLang changes transformers for whoever shares the process."""
    program = (
        "from scripts.native_fields import library_json; from scripts.sglang_fields import sglang_fields; "
        "print(library_json(sglang_fields()), end='')"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=900, check=True)
    assert done.stdout == (files("megarl.config") / "native_options" / "sglang.json").read_text(), (
        "write it with python -m scripts.sglang_fields"
    )
