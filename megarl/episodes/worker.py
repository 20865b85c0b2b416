"""The process of an episode's environment: `python -m megarl.episodes.worker SOCKET TASK`.

It sets its limits, imports the classes, reports their tools, then opens one instance of each per episode and answers
calls. Whatever the user's code does, the answer is an observation, a score or an error. Every public method of a class
is a tool: `tool_methods` makes its schema from the signature, and checks the model's arguments by it.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import typing
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, NotRequired, TypedDict, cast

from pydantic import BaseModel, ConfigDict, PydanticUserError, ValidationError, create_model
from pydantic.errors import PydanticSchemaGenerationError

from megarl.episodes.program import ProgramError, ProgramTask, run_program
from megarl.episodes.protocol import Observation, PreparedTool, ToolSchema, Transcript
from megarl.reward.protocol import check_result, finite_list, type_name
from megarl.system.foreign import finite32
from megarl.system.proc import limited_time
from megarl.system.user_code import describe_error
from megarl.system.user_worker import LoadedCode, Reply, UserError, finished, load_module, serve
from megarl.types import JsonValue

MAX_RESULT_CHARACTERS = 1 << 20
"""A tool's result is cut here, far above what a model is shown: a flood must not fill the channel."""
_ROW = ("uid", "data_source", "ground_truth", "extra_info", "prompt", "messages")
_MEMORY_KEY = "environment.memory_gib"
RESERVED = ("score", "close")
"""Methods that are not tools."""
_NAMED_PARAMETERS = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


class LoadedClass(TypedDict):
    path: str
    name: str | None
    """None takes the only class of the file with a method `score`."""
    options: Mapping[str, JsonValue]
    """Keyword arguments in addition to those of a row; empty for a user's class."""


class EnvironmentTask(TypedDict):
    classes: list[LoadedClass]
    """The user's class, if there is one, is the last; only that one scores."""
    agent: NotRequired[str]
    """A function of the only file, which is run instead."""
    program: NotRequired[ProgramTask]
    """A program that is run instead."""
    has_user_class: bool
    memory_bytes: int | None
    cpu_s: int | None
    call_deadline_s: float


class _Classes:
    """The classes of a task, and their instances of one episode after the other."""

    def __init__(self, task: EnvironmentTask) -> None:
        self._task = task
        self._loaded = [_load_class(each, place) for place, each in enumerate(task["classes"])]
        self._methods: dict[str, tuple[int, ToolMethod]] = {}
        for place, cls in enumerate(self._loaded):
            for name, method in tool_methods(cls).items():
                if name in self._methods:
                    other = self._loaded[self._methods[name][0]]
                    raise UserError("path", f"two tools have the name {name}: of {other.__name__} and {cls.__name__}")
                self._methods[name] = (place, method)
        if task["has_user_class"]:
            cls = self._loaded[-1]
            if not callable(getattr(cls, "score", None)):
                raise UserError("path", f"{cls.__name__} has no method score(self, transcript); it returns the reward")
            _check_start(cls)
        self._instances: list[object] = []

    @property
    def schemas(self) -> list[dict[str, object]]:
        return [asdict(method.schema) for _, method in self._methods.values()]

    def open(self, row: Mapping[str, JsonValue]) -> dict[str, object]:
        self.close()
        for cls, task in zip(self._loaded, self._task["classes"], strict=True):
            self._instances.append(cls(**_named(cls, {**row, **task["options"]})))
        return {}

    def call(self, name: str, arguments: Mapping[str, JsonValue], runner: asyncio.Runner) -> dict[str, object]:
        place, method = self._methods[name]
        try:
            read = method.read(arguments)
        except BadArgumentsError as error:
            return _failed(f"{name}: {error}")
        path, instance = Path(self._task["classes"][place]["path"]), self._instances[place]
        try:
            if isinstance(instance, PreparedTool):
                instance.prepare()
            with limited_time(self._task["call_deadline_s"]):
                return _observed(finished(partial(getattr(instance, name), **read), runner))
        except TimeoutError:
            return _failed(f"{name} gave no result within {self._task['call_deadline_s']:g} s")
        except BaseException as error:  # noqa: BLE001 - the user's code may raise anything, SystemExit too
            if getattr(error, "is_machine_fault", False):
                return {"lost": f"{name}: {error}"}
            return _failed(f"{name} {_error_text(error, path)}")

    def score(self, transcript: Transcript, runner: asyncio.Runner) -> dict[str, object]:
        if not self._task["has_user_class"]:
            return {}
        path = Path(self._task["classes"][-1]["path"])
        scorer = cast("Callable[[Transcript], object]", self._instances[-1].score)  # type: ignore[attr-defined]
        return scored(partial(scorer, transcript), runner, path)

    def close(self) -> dict[str, object]:
        instances, self._instances = self._instances, []
        for instance in instances:
            closing = getattr(instance, "close", None)
            if callable(closing):
                closing()
        return {}


def score_answer(value: object) -> dict[str, object]:
    """Return what a user's code returned as a score as an `Answer`, with `turns` where it has rewards of turns."""
    turns = value.get("turns") if isinstance(value, Mapping) else None
    answer = cast("dict[str, object]", check_result(value, None))
    if turns is None or "error" in answer:
        return answer
    rewards = finite_list(turns)
    if rewards is None:
        return {"error": f"returned a {type_name(turns)} for turns; it must be a list of one finite number per turn"}
    return {**answer, "turns": rewards}


def scored(call: Callable[[], object], runner: asyncio.Runner, path: Path) -> dict[str, object]:
    """Return the answer of a scoring call."""
    try:
        value = finished(call, runner)
    except BaseException as error:  # noqa: BLE001 - the user's code may raise anything, SystemExit too
        return {"error": describe_error(error, path, memory_key=_MEMORY_KEY)}
    return score_answer(value)


def _load(values: Mapping[str, object]) -> LoadedCode:
    task = cast("EnvironmentTask", values)
    files = [Path(each["path"]) for each in task["classes"]]
    if "program" in task:
        return LoadedCode(files=[], report={"tools": []}, reply=partial(_program_reply, task["program"]))
    if "agent" in task:
        return LoadedCode(files=files, report={"tools": []}, reply=_agent_replies(task))
    classes = _Classes(task)
    return LoadedCode(files=files, report={"tools": classes.schemas}, reply=_class_replies(classes, task))


_Replies = Callable[[Mapping[str, object], asyncio.Runner], Reply]


def _class_replies(classes: _Classes, task: EnvironmentTask) -> _Replies:
    path = Path(task["classes"][-1]["path"])

    def reply(request: Mapping[str, object], runner: asyncio.Runner) -> Reply:
        arguments = cast("dict[str, JsonValue]", request.get("arguments", {}))
        match request["does"]:
            case "call":
                return classes.call(str(request["name"]), arguments, runner)
            case "score":
                return classes.score(_transcript(arguments), runner)
            case "open" | "close" as does:
                try:
                    return classes.open(arguments) if does == "open" else classes.close()
                except BaseException as error:  # noqa: BLE001 - the user's code may raise anything
                    return {"error": f"{does} {describe_error(error, path, memory_key=_MEMORY_KEY)}"}
            case other:
                raise AssertionError(f"unknown request {other}")

    return reply


def _agent_replies(task: EnvironmentTask) -> _Replies:
    (loaded,) = task["classes"]
    path, name = Path(loaded["path"]), task["agent"]
    module = load_module(path, name="megarl_user_agent")
    run: object = getattr(module, name, None)
    if not callable(run):
        raise UserError("name", f"{path} has no function {name}(task, base_url, api_key)")
    try:
        inspect.signature(run).bind(task={}, base_url="", api_key="")
    except TypeError as error:
        raise UserError("name", f"{name} in {path} must take task, base_url and api_key: {error}") from None

    def reply(request: Mapping[str, object], runner: asyncio.Runner) -> Reply:
        arguments = cast("dict[str, object]", request["arguments"])
        return scored(partial(run, **arguments), runner, path)

    return reply


def _program_reply(program: ProgramTask, request: Mapping[str, object], _: asyncio.Runner) -> Reply:
    arguments = cast("dict[str, Any]", request["arguments"])
    try:
        written = run_program(program, Path(arguments["folder"]), arguments["task"], arguments["variables"])
    except ProgramError as error:
        return {"error": str(error)}
    return {} if program["result"] is None else score_answer(written)


def _load_class(task: LoadedClass, place: int) -> type:
    path, name = Path(task["path"]), task["name"]
    module = load_module(path, name=f"megarl_user_environment_{place}")
    own = {key: cls for key, cls in vars(module).items() if inspect.isclass(cls) and cls.__module__ == module.__name__}
    if name is not None:
        found = getattr(module, name, None)
        if not inspect.isclass(found):
            raise UserError("name", f"{path} has no class {name}; it has {', '.join(own) or 'none'}")
        return found
    scoring = [cls for cls in own.values() if callable(getattr(cls, "score", None))]
    if len(scoring) == 1:
        return scoring[0]
    if not scoring:
        raise UserError("path", f"no class in {path} has a method score(self, transcript); it returns the reward")
    raise UserError("name", f"{path} has several classes with score: name one of {', '.join(own)}")


def _check_start(cls: type) -> None:
    """Raise if the constructor needs arguments that no row has."""
    parameters = inspect.signature(cls).parameters.values()
    kinds = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    needed = [each.name for each in parameters if each.default is each.empty and each.kind not in kinds]
    missing = [name for name in needed if name not in _ROW]
    if missing:
        raise UserError(
            "path", f"{cls.__name__} takes {', '.join(missing)}, which no row has; rows have {', '.join(_ROW)}"
        )


def _named(cls: type, row: Mapping[str, JsonValue]) -> dict[str, JsonValue]:
    """Return the facts of a row that the constructor names, all for `**row`."""
    parameters = inspect.signature(cls).parameters
    takes_any = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values())
    return {name: item for name, item in row.items() if takes_any or name in parameters}


def _observed(value: object) -> dict[str, object]:
    observation = value if isinstance(value, Observation) else Observation(text=_as_text(value))
    reward = observation.reward
    if reward is not None and finite32(reward) is None:
        return _failed("the tool gave a reward that is not finite")
    text = observation.text[:MAX_RESULT_CHARACTERS]
    return {**asdict(observation), "text": text, "num_characters": len(observation.text)}


def _as_text(value: object) -> str:
    if value is None or isinstance(value, str):
        return value or ""
    try:
        return json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError):
        return str(value)


def _failed(text: str) -> dict[str, object]:
    return asdict(Observation(text=f"error: {text}", is_error=True))


def _error_text(error: BaseException, path: Path) -> str:
    """Return the error as the model reads it, without files of the machine."""
    return describe_error(error, path, memory_key=_MEMORY_KEY).rpartition(" (")[0]


def _transcript(values: Mapping[str, JsonValue]) -> Transcript:
    messages = cast("dict[str, list[dict[str, JsonValue]]]", values)
    return Transcript(
        prompt=tuple(messages["prompt"]),
        messages=tuple(messages["messages"]),
        ending=str(values["ending"]),
        token_ids=tuple(map(tuple, cast("dict[str, list[list[int]]]", values)["token_ids"])),
    )


class BadArgumentsError(Exception):
    """The model's arguments are not those of the tool."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolMethod:
    schema: ToolSchema
    arguments: type[BaseModel]

    def read(self, arguments: Mapping[str, JsonValue]) -> dict[str, object]:
        """Return the arguments in the types that the method declares; a BadArgumentsError if they do not fit."""
        try:
            read = self.arguments.model_validate(dict(arguments))
        except ValidationError as error:
            problems = [f"{'.'.join(map(str, each['loc'])) or 'arguments'}: {each['msg']}" for each in error.errors()]
            raise BadArgumentsError("; ".join(problems[:5])) from None
        return {name: getattr(read, name) for name in self.arguments.model_fields if name in read.model_fields_set}


def tool_methods(cls: type) -> dict[str, ToolMethod]:
    """Return the tools by name; a UserError for a public method that cannot be one."""
    methods = inspect.getmembers(cls, inspect.isfunction)
    reserved = (*RESERVED, *(vars(PreparedTool) if issubclass(cls, PreparedTool) else ()))
    return {
        name: _method(cls, name, function)
        for name, function in methods
        if not name.startswith("_") and name not in reserved
    }


def _method(cls: type, name: str, function: Callable[..., object]) -> ToolMethod:
    where = f"the tool {cls.__name__}.{name}"
    description = inspect.getdoc(function)
    if not description:
        raise UserError("path", f"{where} has no docstring; write what it does, or begin its name with _")
    try:
        hints = typing.get_type_hints(function, include_extras=True)
    except (NameError, TypeError) as error:
        raise UserError("path", f"{where} has a type that cannot be read: {error}") from None
    fields: dict[str, object] = {}
    for parameter in [*inspect.signature(function).parameters.values()][1:]:
        if parameter.kind not in _NAMED_PARAMETERS:
            raise UserError("path", f"{where} takes {parameter}; a model gives arguments by name: list them")
        if parameter.name not in hints:
            raise UserError(
                "path", f"{where} has no type for {parameter.name}; write one, such as {parameter.name}: int"
            )
        default = ... if parameter.default is inspect.Parameter.empty else parameter.default
        fields[parameter.name] = (hints[parameter.name], default)
    try:
        arguments = create_model(f"{name}_arguments", __config__=ConfigDict(extra="forbid"), **fields)  # type: ignore[call-overload]
        parameters = _without_titles(arguments.model_json_schema())
    except (PydanticUserError, PydanticSchemaGenerationError, NameError) as error:
        reason = str(error).partition("\n")[0]
        raise UserError("path", f"{where} has a type that is not JSON: {reason}") from None
    assert isinstance(parameters, dict)
    schema = ToolSchema(name=name, description=description, parameters=parameters)
    return ToolMethod(schema=schema, arguments=arguments)


def _without_titles(schema: JsonValue) -> JsonValue:
    """Return the schema without the titles that pydantic makes of names: tokens that say nothing."""
    if isinstance(schema, list):
        return [_without_titles(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    return {key: _without_titles(item) for key, item in schema.items() if key != "title" or isinstance(item, dict)}


if __name__ == "__main__":
    serve(_load)
