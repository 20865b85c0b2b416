from __future__ import annotations

from megarl.config.native import read_library
from megarl.train.native_fields import megatron_fields


def test_the_data_file_is_what_the_installed_megatron_takes() -> None:
    assert read_library("megatron") == megatron_fields(), (
        "write it with python -m megarl.train.native_fields > megarl/config/native/megatron.json"
    )
