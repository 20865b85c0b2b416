"""Opens the environments of the recipe's `environment` section, and checks the section. Knows its kinds."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, assert_never, cast

import pyarrow as pa
import pyarrow.parquet as pq

from megarl.config.checks.secrets import secret_in
from megarl.config.environment import (
    AgentEnvironmentConfig,
    BuiltInToolsConfig,
    ChatEnvironmentConfig,
    ClassEnvironmentConfig,
    CommandEnvironmentConfig,
    EnvironmentConfig,
    FunctionEnvironmentConfig,
    HarborEnvironmentConfig,
    McpEnvironmentConfig,
    OpenEnvEnvironmentConfig,
    SearchToolConfig,
    ToolEnvironmentConfig,
    has_agent,
)
from megarl.config.section import GIB
from megarl.data.tokenizer import Tokenizer
from megarl.episodes.agents import ChatAgents, FunctionAgents, agent_task, load_function
from megarl.episodes.built_in.python import START_TIMEOUT_S
from megarl.episodes.built_in.search import ensure_index, index_path
from megarl.episodes.class_environments import ClassEnvironments
from megarl.episodes.dialogue import Dialogue
from megarl.episodes.harbor.build import check_harbor, open_box_agents, open_harbor
from megarl.episodes.openenv_environments import open_openenv
from megarl.episodes.processes import PROGRAM, EpisodeProcesses, ProcessLimits
from megarl.episodes.protocol import Agents, Environments, ToolSchema
from megarl.episodes.worker import EnvironmentTask, LoadedClass
from megarl.errors import ConfigError, Problem, RewardError
from megarl.reward.judge import read_key
from megarl.system.network import LOOPBACK
from megarl.system.secret import Secret
from megarl.system.user_process import UserLoadError, try_loading

_BUILT_IN = Path(__file__).parent / "built_in"
_SCRIPTS = (".py", ".sh", ".js", ".mjs", ".ts", ".rb", ".pl")
_SANDBOX_SHARE = 0.8
"""The sandbox ends code earlier than the call's deadline, so that the model is told and the episode goes on."""


async def open_environments(config: ToolEnvironmentConfig, *, log_path: Path | None = None) -> Environments:
    """Return the environments of a run, whose tools are known; a ConfigError if they cannot be had."""
    match config:
        case ClassEnvironmentConfig():
            return await _open_class(config, log_path)
        case McpEnvironmentConfig():
            # Its library is a tenth of what a driver imports, and every start of a run waits for that.
            from megarl.episodes.mcp_environments import open_mcp  # noqa: PLC0415

            keys = {name: _key(path, f"api_key_files.{name}") for name, path in config.api_key_files.items()}
            return await open_mcp(config.servers, keys=keys, timeout_s=config.call_deadline_s)
        case OpenEnvEnvironmentConfig():
            key = None if config.api_key_file is None else _key(config.api_key_file, "api_key_file")
            return await open_openenv(config.url, key=key, timeout_s=config.call_deadline_s)
        case HarborEnvironmentConfig():
            return await open_harbor(config)
        case _:
            assert_never(config)


def _key(path: Path, name: str) -> Secret:
    try:
        return read_key(path)
    except RewardError as error:
        raise ConfigError("recipe", (Problem(key=f"environment.{name}", message=str(error)),)) from None


async def open_agents(
    config: AgentEnvironmentConfig | HarborEnvironmentConfig,
    tokenizer: Tokenizer,
    *,
    host: str = LOOPBACK,
    log_path: Path | None = None,
) -> Agents:
    """Return the agents of a run, which reach the model at `host`; a ConfigError if their code cannot be loaded."""
    match config:
        case ChatEnvironmentConfig() | CommandEnvironmentConfig():
            gives_way = await _check_agent(config)
            agents = ChatAgents(config, tokenizer, gives_way=gives_way, host=host, log_path=log_path)
            await agents.start()
            return agents
        case FunctionEnvironmentConfig():
            return FunctionAgents(config, tokenizer)
        case HarborEnvironmentConfig():
            return await open_box_agents(config, tokenizer, host=host)
        case _:
            assert_never(config)


async def _check_agent(config: ChatEnvironmentConfig | CommandEnvironmentConfig) -> bool:
    """Return whether agents can share a process; a ConfigError if there is none."""
    if isinstance(config, CommandEnvironmentConfig):
        if (message := _missing_program(config.command)) is not None:
            raise ConfigError("recipe", (Problem(key="environment.command", message=message),))
        return True
    if not config.path.is_file():
        message = f"{config.path} is not a file; name your Python file"
        raise ConfigError("recipe", (Problem(key="environment.path", message=message),))
    report = await _reported(agent_task(config), None)
    if not report["gives_way"] and (config.episodes_per_process or 1) > 1:
        message = (
            f"{config.name} in {config.path} is not async, so that agents cannot share a process; leave the key out"
        )
        raise ConfigError("recipe", (Problem(key="environment.episodes_per_process", message=message),))
    return bool(report["gives_way"])


def _missing_program(command: Sequence[str]) -> str | None:
    """Return what is not there of a command: its program, or the script that an interpreter is to run."""
    if shutil.which(command[0]) is None:
        return f"there is no program {command[0]} here; name one of PATH, or an executable file"
    first = next((word for word in command[1:] if not word.startswith("-")), "")
    if Path(first).suffix in _SCRIPTS and not Path(first).is_file():
        return f"{first} is not a file; paths are from the folder where megarl is started"
    return None


async def _reported(task: EnvironmentTask, log_path: Path | None) -> Mapping[str, object]:
    """Start one process; return what it reports, or raise a ConfigError if it cannot load the code."""
    values = cast("Mapping[str, object]", task)
    try:
        return await try_loading(PROGRAM, values, section="environment", log_path=log_path)
    except UserLoadError as error:
        raise ConfigError("recipe", (error.problem,)) from None


def check_environment(config: EnvironmentConfig | None) -> list[Problem]:
    """Return every problem of the section: files, imports, tools, servers that do not answer.

    Starts its own event loop.
    """
    if config is None or _has_secrets(config):
        return []
    try:
        asyncio.run(_try_environment(config))
    except ConfigError as error:
        return list(error.problems)
    return []


def _has_secrets(config: EnvironmentConfig) -> bool:
    """Whether a URL has a secret, for which the recipe is refused: no server sees it, and no message shows it."""
    urls = [*(config.servers.values() if isinstance(config, McpEnvironmentConfig) else ())]
    urls += [config.url] if isinstance(config, OpenEnvEnvironmentConfig) else []
    return any(secret_in(url) is not None for url in urls)


async def _try_environment(config: EnvironmentConfig) -> None:
    match config:
        case ChatEnvironmentConfig() | CommandEnvironmentConfig():
            await _check_agent(config)
        case FunctionEnvironmentConfig():
            load_function(config)
        case HarborEnvironmentConfig():
            await check_harbor(config)
        case _:
            environments = await open_environments(config)
            await environments.close()


def build_dialogue(config: ToolEnvironmentConfig, tokenizer: Tokenizer) -> Dialogue:
    """Return the dialogue of episodes whose tools are those of the tokenizer."""
    return Dialogue(
        tokenizer,
        max_result_tokens=config.max_result_tokens,
        call_format=config.call_format,
        text_field=config.text_field if isinstance(config, OpenEnvEnvironmentConfig) else None,
    )


def rehearse(config: EnvironmentConfig, tokenizer: Tokenizer, *, max_response_tokens: int) -> str | None:
    """Rehearse turns with the model's template; return a line on its history, None for agents, which bring their tools.

    Raise a ConfigError for a template that cannot be used, and for turns that do not fit.
    """
    if has_agent(config):
        return None
    assert isinstance(config, ToolEnvironmentConfig)
    dialogue = build_dialogue(config, tokenizer)
    problems = [Problem(key="data.template", message=refusal) for refusal in dialogue.refusals()]
    if not problems and (least := dialogue.least_tokens(config.max_turns)) > max_response_tokens:
        message = (
            f"{config.max_turns} turns have at least {least} tokens, and sampling.max_response_tokens of a whole "
            f"episode is {max_response_tokens}; raise that or lower this"
        )
        problems.append(Problem(key="environment.max_turns", message=message))
    if problems:
        raise ConfigError("recipe", tuple(problems))
    return f"{tokenizer.folder}: {dialogue.rehearsal()}"


async def _open_class(config: ClassEnvironmentConfig, log_path: Path | None) -> ClassEnvironments:
    if problems := list(_file_problems(config)):
        raise ConfigError("recipe", tuple(problems))
    if (search := config.tools.search) is not None:
        index = index_path(search.documents, search.index)
        await asyncio.to_thread(
            ensure_index, search.documents, text_key=search.text_key, title_key=search.title_key, index=index
        )
    task = _class_task(config)
    report = await _reported(task, log_path)
    tools = tuple(ToolSchema(**tool) for tool in cast("list[dict[str, Any]]", report["tools"]))
    limits = ProcessLimits(
        workers=config.workers,
        episodes_per_process=config.episodes_per_process,
        episodes_per_worker=config.episodes_per_worker,
    )
    processes = EpisodeProcesses(task, limits, gives_way=bool(report["gives_way"]), log_path=log_path)
    prepare_s = 0.0 if config.tools.python is None else START_TIMEOUT_S
    return ClassEnvironments(processes, tools=tools, call_deadline_s=config.call_deadline_s, prepare_s=prepare_s)


def _class_task(config: ClassEnvironmentConfig) -> EnvironmentTask:
    classes = [*_built_in(config.tools, config.call_deadline_s)]
    if config.path is not None:
        classes.append(LoadedClass(path=str(config.path.resolve()), name=config.name, options={}))
    return EnvironmentTask(
        classes=classes,
        has_user_class=config.path is not None,
        memory_bytes=None if config.memory_gib is None else int(config.memory_gib * GIB),
        cpu_s=config.cpu_s,
        call_deadline_s=config.call_deadline_s,
    )


def _built_in(tools: BuiltInToolsConfig, call_deadline_s: float) -> Iterator[LoadedClass]:
    if (python := tools.python) is not None:
        options = {**python.model_dump(mode="json"), "deadline_s": _SANDBOX_SHARE * call_deadline_s}
        yield LoadedClass(path=str(_BUILT_IN / "python.py"), name="Python", options=options)
    if (search := tools.search) is not None:
        index = str(index_path(search.documents, search.index).absolute())
        options = {"index": index, "max_results": search.max_results}
        yield LoadedClass(path=str(_BUILT_IN / "search.py"), name="Search", options=options)


def _file_problems(config: ClassEnvironmentConfig) -> Iterator[Problem]:
    if config.tools.python is not None and (config.episodes_per_process or 1) > 1:
        message = "a sandbox belongs to one episode and keeps others waiting; leave it out beside tools.python"
        yield Problem(key="environment.episodes_per_process", message=message)
    if config.path is None and config.tools == BuiltInToolsConfig():
        yield Problem(key="environment", message="has neither a path nor tools; name your Python file")
    if config.path is not None and not config.path.is_file():
        yield Problem(key="environment.path", message=f"{config.path} is not a file; name your Python file")
    if config.tools.search is not None:
        yield from _document_problems(config.tools.search)


def _document_problems(config: SearchToolConfig) -> Iterator[Problem]:
    key = "environment.tools.search"
    for path in config.documents:
        try:
            columns = pq.read_schema(path).names
        except (OSError, pa.ArrowInvalid) as error:
            yield Problem(key=f"{key}.documents", message=f"{path} is not a Parquet file: {error}")
            continue
        for name, column in (("text_key", config.text_key), ("title_key", config.title_key)):
            if column is not None and column not in columns:
                yield Problem(
                    key=f"{key}.{name}", message=f"{path} has no column {column}; it has {', '.join(columns)}"
                )
