"""The checks of an environment at validation: one line each, and a rehearsal of turns."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import pytest
from pydantic import TypeAdapter

from megarl.config.environment import ChatEnvironmentConfig, ClassEnvironmentConfig, EnvironmentConfig
from megarl.episodes.build import check_environment, rehearse
from megarl.errors import ConfigError
from tests.episodes.conftest import CALCULATOR
from tests.episodes.templates import family_tokenizer


def _config(path: Path, **keys: object) -> ClassEnvironmentConfig:
    return ClassEnvironmentConfig.model_validate({"kind": "class", "path": path, **keys})


def test_a_right_section_has_no_problems(tmp_path: Path) -> None:
    path = tmp_path / "environment.py"
    path.write_text(CALCULATOR)
    assert check_environment(_config(path)) == []
    assert check_environment(None) == []


def test_a_missing_file_is_one_problem(tmp_path: Path) -> None:
    (problem,) = check_environment(_config(tmp_path / "nowhere.py"))
    assert str(problem).startswith("environment.path: ")


def test_a_rehearsal_says_whether_history_only_grows(tmp_path: Path) -> None:
    config = _config(tmp_path / "environment.py", max_turns=4)
    exact = rehearse(config, family_tokenizer(tmp_path / "qwen3", "qwen3"), max_response_tokens=4096)
    assert exact is not None
    assert exact.endswith("5 synthetic turns: history is append-only, with thoughts and without")
    dropped = rehearse(config, family_tokenizer(tmp_path / "forgetful", "forgetful"), max_response_tokens=4096)
    assert dropped is not None
    assert "drops old thoughts" in dropped


def test_turns_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    tokenizer = family_tokenizer(tmp_path / "qwen2.5", "qwen2.5")
    config = _config(tmp_path / "environment.py", max_turns=50)
    with pytest.raises(ConfigError, match=r"environment\.max_turns: 50 turns have at least \d+ tokens"):
        rehearse(config, tokenizer, max_response_tokens=256)
    assert rehearse(config, tokenizer, max_response_tokens=8192) is not None


def test_a_template_without_tools_is_refused(tmp_path: Path) -> None:
    plain = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    tokenizer = family_tokenizer(tmp_path / "plain", "qwen2.5", template=plain)
    with pytest.raises(ConfigError, match=r"data\.template: the chat template does not render tools: add"):
        rehearse(_config(tmp_path / "environment.py"), tokenizer, max_response_tokens=8192)


def test_agents_bring_their_own_tools(tmp_path: Path) -> None:
    tokenizer = family_tokenizer(tmp_path / "qwen2.5", "qwen2.5", tools=())
    config = ChatEnvironmentConfig(kind="chat", path=tmp_path / "agent.py")
    assert rehearse(config, tokenizer, max_response_tokens=64) is None


class _Refusing(BaseHTTPRequestHandler):
    """Answers 401, and keeps what it was sent as a key."""

    seen: ClassVar[list[str | None]] = []

    def do_GET(self) -> None:
        self.seen.append(self.headers.get("Authorization"))
        self.send_error(401)

    do_POST = do_GET  # noqa: N815 - the name that http.server calls

    def log_message(self, *_words: object) -> None:
        pass


@pytest.fixture
def refusing() -> Iterator[int]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Refusing)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    _Refusing.seen.clear()
    yield server.server_port
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.parametrize("kind", ["mcp", "openenv"])
def test_a_server_gets_its_key_and_no_message_has_it(kind: str, refusing: int, tmp_path: Path) -> None:
    (tmp_path / "key").write_text("canary-7f1b2\n")
    url = f"http://127.0.0.1:{refusing}/ws"
    keys: dict[str, object] = {"url": url, "api_key_file": tmp_path / "key"}
    if kind == "mcp":
        keys = {"servers": {"tools": url}, "api_key_files": {"tools": tmp_path / "key"}}
    config = TypeAdapter[EnvironmentConfig](EnvironmentConfig).validate_python(
        {"kind": kind, "call_deadline_s": 10, **keys}
    )
    (problem,) = check_environment(config)
    assert "canary" not in str(problem)
    assert set(_Refusing.seen) == {"Bearer canary-7f1b2"}
    (tmp_path / "key").write_text("two keys")
    (problem,) = check_environment(config)
    assert str(problem).endswith("must contain one key and nothing else")
