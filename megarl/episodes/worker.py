"""The process of an episode's environment: `python -m megarl.episodes.worker SOCKET TASK`.

It sets its limits, imports the classes, reports their tools, then opens one instance of each per episode and answers
calls. Whatever the user's code does, the answer is an observation, a score or an error. Every public method of a class
is a tool: `tool_methods` makes its schema from the signature, and checks the model's arguments by it.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import threading
import typing
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, NotRequired, TypedDict, cast

from pydantic import BaseModel, ConfigDict, PydanticUserError, ValidationError, create_model
from pydantic.errors import PydanticSchemaGenerationError

from megarl.episodes.program import ProgramError, ProgramTask, run_program
from megarl.episodes.protocol import Observation, PreparedTool, ToolSchema, Transcript
from megarl.reward.protocol import check_result, finite_list, type_name
from megarl.system.foreign import finite32, image_in
from megarl.system.proc import limited_time
from megarl.system.shared_worker import AnswersBeside, BlockedError, CpuTimeError, SharedLoop, Within
from megarl.system.user_code import describe_error
from megarl.system.user_worker import LoadedCode, Reply, UserError, finished, load_module, serve_in_turn, start
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


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeCode(LoadedCode):
    answer: AnswersBeside
    """Answers a request where other episodes share the process."""


class _Classes:
    """The classes of a task."""

    def __init__(self, task: EnvironmentTask) -> None:
        self.task = task
        self._loaded = [_load_class(each, place) for place, each in enumerate(task["classes"])]
        self.methods: dict[str, tuple[int, ToolMethod]] = {}
        for place, cls in enumerate(self._loaded):
            for name, method in tool_methods(cls).items():
                if name in self.methods:
                    other = self._loaded[self.methods[name][0]]
                    raise UserError("path", f"two tools have the name {name}: of {other.__name__} and {cls.__name__}")
                self.methods[name] = (place, method)
        if task["has_user_class"]:
            cls = self._loaded[-1]
            if not callable(getattr(cls, "score", None)):
                raise UserError("path", f"{cls.__name__} has no method score(self, transcript); it returns the reward")
            _check_start(cls)

    @property
    def report(self) -> dict[str, object]:
        return {"tools": [asdict(method.schema) for _, method in self.methods.values()], "gives_way": self._gives_way}

    @property
    def _gives_way(self) -> bool:
        """Whether all that an episode calls is `async`, but for constructors."""
        called = [getattr(self._loaded[place], name) for name, (place, _) in self.methods.items()]
        called += [getattr(cls, name) for cls in self._loaded for name in RESERVED if hasattr(cls, name)]
        return all(map(inspect.iscoroutinefunction, called))

    def instances(self, row: Mapping[str, JsonValue]) -> Iterator[object]:
        """Make an instance of each class for an episode."""
        for cls, task in zip(self._loaded, self.task["classes"], strict=True):
            yield cls(**_named(cls, {**row, **task["options"]}))


class _Surroundings:
    """The instances of one episode."""

    def __init__(self, classes: _Classes) -> None:
        self._classes = classes
        self._task = classes.task
        self._path = Path(classes.task["classes"][-1]["path"])
        self._instances: list[object] = []

    def reply(self, request: Mapping[str, object], runner: asyncio.Runner) -> Reply:
        """Answer a request in a process of the episode's own."""
        arguments = cast("dict[str, JsonValue]", request.get("arguments", {}))
        match request["does"]:
            case "call":
                return self._call(str(request["name"]), arguments, runner)
            case "score":
                scorer = self._scorer(arguments)
                return {} if scorer is None else scored(partial(finished, scorer, runner), self._path)
            case "open" | "close" as does:
                try:
                    for step in self._steps(does, arguments):
                        step()
                except BaseException as error:  # noqa: BLE001 - the user's code may raise anything
                    return self._failure(does, error)
                return {}
            case other:
                raise AssertionError(f"unknown request {other}")

    async def answer(self, request: Mapping[str, object], within: Within) -> Reply:
        """Answer a request in a process that others share."""
        arguments = cast("dict[str, JsonValue]", request.get("arguments", {}))
        deadline_s = self._task["call_deadline_s"]
        match request["does"]:
            case "call":
                return await self._call_beside(str(request["name"]), arguments, within)
            case "score":
                scorer = self._scorer(arguments)
                return {} if scorer is None else await scored_beside(_result(scorer), self._path, within, deadline_s)
            case "open" | "close" as does:
                try:
                    for step in self._steps(does, arguments):
                        await within(deadline_s, _result(step))
                except BaseException as error:  # noqa: BLE001 - the user's code may raise anything
                    return self._failure(does, error)
                return {}
            case other:
                raise AssertionError(f"unknown request {other}")

    def _steps(self, does: str, arguments: Mapping[str, JsonValue]) -> Iterator[Callable[[], object]]:
        """Yield what is done to end the episode before, and to begin one."""
        instances, self._instances = self._instances, []
        yield from (closing for each in instances if callable(closing := getattr(each, "close", None)))
        if does == "open":
            making = self._classes.instances(arguments)
            yield from (lambda: self._instances.append(next(making)) for _ in self._task["classes"])

    def _failure(self, does: str, error: BaseException) -> Reply:
        return {"error": f"{does} {describe_error(error, self._path, memory_key=_MEMORY_KEY)}"}

    def _scorer(self, arguments: Mapping[str, JsonValue]) -> Callable[[], object] | None:
        if not self._task["has_user_class"]:
            return None
        scorer = cast("Callable[[Transcript], object]", self._instances[-1].score)  # type: ignore[attr-defined]
        return partial(scorer, _transcript(arguments))

    def _call(self, name: str, arguments: Mapping[str, JsonValue], runner: asyncio.Runner) -> Reply:
        place, method = self._classes.methods[name]
        instance = self._instances[place]
        try:
            read = method.read(arguments)
            if isinstance(instance, PreparedTool):
                instance.prepare()
            with limited_time(self._task["call_deadline_s"]):
                return _observed(name, finished(partial(getattr(instance, name), **read), runner))
        except BaseException as error:  # noqa: BLE001 - the user's code may raise anything, SystemExit too
            return self._failed_call(name, error)

    async def _call_beside(self, name: str, arguments: Mapping[str, JsonValue], within: Within) -> Reply:
        place, method = self._classes.methods[name]
        try:
            read = method.read(arguments)
            calling = _result(partial(getattr(self._instances[place], name), **read))
            return _observed(name, await within(self._task["call_deadline_s"], calling))
        except (BlockedError, CpuTimeError) as error:
            return {"lost": f"{name}: {error}", "is_crowded": True}
        except asyncio.CancelledError:
            raise
        except BaseException as error:  # noqa: BLE001 - the user's code may raise anything, SystemExit too
            return self._failed_call(name, error)

    def _failed_call(self, name: str, error: BaseException) -> Reply:
        if isinstance(error, BadArgumentsError):
            return _failed(f"{name}: {error}")
        if isinstance(error, TimeoutError):
            return _failed(f"{name} gave no result within {self._task['call_deadline_s']:g} s")
        if getattr(error, "is_machine_fault", False):
            return {"lost": f"{name}: {error}"}
        path = Path(self._task["classes"][self._classes.methods[name][0]]["path"])
        return _failed(f"{name} {_error_text(error, path)}")


async def _result(call: Callable[[], object]) -> object:
    value = call()
    return await value if inspect.isawaitable(value) else value


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


def scored(call: Callable[[], object], path: Path) -> dict[str, object]:
    """Return the answer of a scoring call."""
    try:
        value = call()
    except BaseException as error:  # noqa: BLE001 - the user's code may raise anything, SystemExit too
        return {"error": describe_error(error, path, memory_key=_MEMORY_KEY)}
    return score_answer(value)


async def scored_beside(scoring: Awaitable[object], path: Path, within: Within, seconds: float) -> dict[str, object]:
    """Return the answer of a scoring call in a process that others share."""
    try:
        value = await within(seconds, scoring)
    except asyncio.CancelledError:
        raise
    except BaseException as error:  # noqa: BLE001 - the user's code may raise anything, SystemExit too
        is_crowded = isinstance(error, BlockedError | CpuTimeError)
        return {"error": describe_error(error, path, memory_key=_MEMORY_KEY), "is_crowded": is_crowded}
    return score_answer(value)


def _load(values: Mapping[str, object]) -> EpisodeCode:
    task = cast("EnvironmentTask", values)
    files = [Path(each["path"]) for each in task["classes"]]
    if "program" in task:
        program = task["program"]
        return EpisodeCode(
            files=[],
            report={"tools": [], "gives_way": True},
            reply=lambda request, _: _program_reply(program, request),
            answer=partial(_program_answer, program),
        )
    if "agent" in task:
        return _agent_code(task, files)
    classes = _Classes(task)
    episodes: dict[object, _Surroundings] = {}

    def answer(request: Mapping[str, Any], within: Within) -> Coroutine[Any, Any, Reply]:
        episode = request["episode"]
        if request["does"] == "close":
            return episodes.pop(episode, _Surroundings(classes)).answer(request, within)
        return episodes.setdefault(episode, _Surroundings(classes)).answer(request, within)

    return EpisodeCode(files=files, report=classes.report, reply=_Surroundings(classes).reply, answer=answer)


def _agent_code(task: EnvironmentTask, files: Sequence[Path]) -> EpisodeCode:
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

    def called(request: Mapping[str, Any]) -> Callable[[], object]:
        return partial(cast("Callable[..., object]", run), **request["arguments"])

    def reply(request: Mapping[str, Any], runner: asyncio.Runner) -> Reply:
        return scored(partial(finished, called(request), runner), path)

    async def answer(request: Mapping[str, Any], within: Within) -> Reply:
        if request["does"] == "close":
            return {}  # its run was cancelled
        return await scored_beside(_result(called(request)), path, within, task["call_deadline_s"])

    gives_way = inspect.iscoroutinefunction(run)
    return EpisodeCode(files=files, report={"tools": [], "gives_way": gives_way}, reply=reply, answer=answer)


def _program_reply(program: ProgramTask, request: Mapping[str, Any], is_over: threading.Event | None = None) -> Reply:
    arguments = request["arguments"]
    try:
        written = run_program(
            program, Path(arguments["folder"]), arguments["task"], arguments["variables"], is_over=is_over
        )
    except ProgramError as error:
        return {"error": str(error)}
    return {} if program["result"] is None else score_answer(written)


async def _program_answer(program: ProgramTask, request: Mapping[str, Any], _: Within) -> Reply:
    if request["does"] == "close":
        return {}
    is_over = threading.Event()
    try:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(None, _program_reply, program, request, is_over)
    finally:
        is_over.set()  # a program whose time is over is ended


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


def _observed(name: str, value: object) -> dict[str, object]:
    if (kind := image_in(value.text if isinstance(value, Observation) else value)) is not None:
        return {"lost": f"{name} gave {kind}, and observations are text alone"}
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


def main() -> None:
    started = start(_load)
    if started is None:
        return
    if "witness" not in started.task:
        serve_in_turn(started)
        return
    assert isinstance(started.code, EpisodeCode), "it was loaded here"
    asyncio.run(SharedLoop(started).serve(started.code.answer))


if __name__ == "__main__":
    main()
