"""The `environment` section: kinds, defaults, refusals."""

from __future__ import annotations

import pytest
from pydantic import TypeAdapter, ValidationError

from megarl.config.environment import (
    ChatEnvironmentConfig,
    ClassEnvironmentConfig,
    EnvironmentConfig,
    McpEnvironmentConfig,
)

_SECTION: TypeAdapter[EnvironmentConfig] = TypeAdapter(EnvironmentConfig)


def test_the_kind_chooses_the_keys() -> None:
    calculator = _SECTION.validate_python(
        {"kind": "class", "path": "calculator.py", "max_turns": 8, "call_deadline_s": 20, "max_result_tokens": 512}
    )
    assert isinstance(calculator, ClassEnvironmentConfig)
    assert calculator.on_error == "retry"
    mcp = _SECTION.validate_python({"kind": "mcp", "servers": {"search": "http://tools:8000/mcp"}})
    assert isinstance(mcp, McpEnvironmentConfig)
    assert isinstance(_SECTION.validate_python({"kind": "chat", "path": "agent.py"}), ChatEnvironmentConfig)


@pytest.mark.parametrize(
    ("section", "word"),
    [
        ({"kind": "clas"}, "kind"),
        ({"kind": "mcp", "servers": {}}, "servers"),
        ({"kind": "mcp", "servers": {"a": "tools:8000"}}, "servers"),
        ({"kind": "class", "path": "a.py", "max_turn": 3}, "max_turn"),
        ({"kind": "chat", "path": "a.py", "max_result_tokens": 3}, "max_result_tokens"),
        ({"kind": "function", "code": "no_name.py"}, "code"),
    ],
)
def test_a_wrong_key_is_named(section: dict[str, object], word: str) -> None:
    with pytest.raises(ValidationError, match=word):
        _SECTION.validate_python(section)
