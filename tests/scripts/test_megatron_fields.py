from __future__ import annotations

import pytest

from megarl.config.native import Library, read_library
from scripts.megatron_fields import CONFIGS, megatron_fields


@pytest.mark.parametrize("library", list(CONFIGS))
def test_the_data_file_is_what_the_installed_megatron_takes(library: Library) -> None:
    assert read_library(library) == megatron_fields(library), "write it with python -m scripts.megatron_fields"
