"""megarl from Python: train, plan and read runs. `import megarl` offers these names and loads them when they are used.

    import megarl

    result = megarl.train("recipes/quickstart.yaml", set={"run.steps": 20}, reward=my_reward, on_step=print)
    result.metrics().to_pandas()

An error is the exception that the command line turns into its exit code: `megarl.errors` has the tree.
"""

from __future__ import annotations

import asyncio
import base64
import inspect
import os
import secrets
import stat
import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Literal, TypeAlias

import dill
from pydantic import JsonValue
from pydantic_core import to_jsonable_python

from megarl.cli.display import NotebookDisplay, is_notebook, make_display
from megarl.cli.lines import make_console
from megarl.config.checks.recipe import check_recipe
from megarl.config.document import Document, override_value, read_document
from megarl.config.hub import with_local_models
from megarl.config.load import validated
from megarl.config.recipe import Recipe, RunConfig
from megarl.episodes.build import check_environment
from megarl.errors import ConfigError, FinishedError, MachineError, PreemptedError, Problem, writing
from megarl.observe.events import Record, Sink, StepFinished
from megarl.observe.summary import StepSummary
from megarl.planner.fit import PlanAnswer, PlanQuestion, answer_for
from megarl.planner.hardware import parse_gpu
from megarl.reward.build import check_reward
from megarl.run import launch
from megarl.run.preemption import interrupt
from megarl.run_result import Result

RecipeSource: TypeAlias = str | Path | Mapping[str, object] | Recipe
"""A YAML file, its content as a mapping, or a recipe that was built in code."""
OwnCode: TypeAlias = Callable[..., object] | str
"""A function or class, also one of a notebook, or its reference `file.py:name`."""

_CODE_FOLDER = ".code"
"""Next to the run folders: functions of this process, for the processes of a run."""


def train(
    recipe: RecipeSource,
    *,
    set: Mapping[str, object] | None = None,
    reward: OwnCode | None = None,
    environment: OwnCode | None = None,
    scorer: OwnCode | None = None,
    estimator: OwnCode | None = None,
    loss: OwnCode | None = None,
    keeps: OwnCode | None = None,
    generator: OwnCode | None = None,
    on_step: Callable[[StepSummary], object] | None = None,
    resume: Path | Literal["auto", "never"] = "auto",
    allows_data_change: bool = False,
    overrides_fit: bool = False,
    is_shown: bool = True,
) -> Result:
    """Run a recipe to its end and return what it left; a finished run is returned as it is.

    `set` has keys as in `{"run.steps": 20}`. `reward` scores one response, `environment` is a class whose methods are
    tools (docs/episodes.md), `scorer` a `stages.Scorer` of whole groups; `estimator`, `loss`, `keeps` and `generator`
    replace parts of the step (docs/extending.md). `on_step` gets the summary of each step in the loop's thread; what it
    raises ends the run. Ctrl-C, also in a notebook, saves first.
    """
    own = {"reward": reward, "environment": environment, "scorer": scorer, "estimator": estimator}
    own |= {"loss": loss, "keeps": keeps, "generator": generator}
    read = load(recipe, set={**({"environment.kind": "class"} if environment is not None else {}), **(set or {})})
    read = load(read, set=code_keys({part: code for part, code in own.items() if code is not None}, read.run))
    checked, problems = with_local_models(read, downloads=True)
    problems += [*check_recipe(checked), *check_reward(checked.reward), *check_environment(checked.environment)]
    if problems:
        raise ConfigError(checked.run.name, tuple(problems))
    display = _Watching(_display() if is_shown else None, on_step)

    run = partial(
        launch.train,
        checked,
        display=display,
        resume=resume,
        allows_data_change=allows_data_change,
        overrides_fit=overrides_fit,
    )
    try:
        with warnings.catch_warnings():
            # Warnings of libraries on import are for developers.
            warnings.simplefilter("ignore")
            _call(run)
    except FinishedError as error:
        if is_shown:
            make_console().print(str(error))
    except PreemptedError:
        if display.error is None:
            raise
    if display.error is not None:
        raise display.error
    return Result(checked.run_folder)


def load(recipe: RecipeSource, *, set: Mapping[str, object] | None = None) -> Recipe:
    """Return a valid recipe; raise a ConfigError with every problem. Opens neither model nor data.

    >>> recipe = load({"run": {"name": "mine", "steps": 2}}, set={"run.steps": 3})
    Traceback (most recent call last):
    ...
    megarl.errors.ConfigError: recipe: 6 problem(s)
      model: missing; this key has no default
      data: missing; this key has no default
      pools: missing; this key has no default
      roles: missing; this key has no default
      algorithm: missing; this key has no default
      train: missing; this key has no default
    """
    match recipe:
        case str() | Path():
            source, document = str(recipe), read_document(Path(recipe))
        case Recipe():
            source, document = recipe.run.name, Document(tree=recipe.model_dump(mode="json"), origins={})
        case _:
            source, document = "recipe", Document(tree=to_jsonable_python(dict(recipe)), origins={})
    for key, value in (set or {}).items():
        document = override_value(document, tuple(key.split(".")), to_jsonable_python(value))
    return validated(document, source=source).recipe


def plan(
    recipe: RecipeSource, *, set: Mapping[str, object] | None = None, gpu: str | None = None, shape: str | None = None
) -> PlanAnswer:
    """Return what a recipe needs: memory, time, and changes that make it fit. Starts nothing, reads no weights.

    >>> answer = plan("recipes/grpo_7b.yaml", gpu="h100", shape="qwen2.5-7b")
    >>> answer.plan.sizes.fits, answer.plan.gpu.name
    (True, 'h100')
    """
    question = PlanQuestion(gpu=None if gpu is None else parse_gpu(gpu), shape_name=shape)
    return answer_for(load(recipe, set=set), question)


def load_run(path: str | Path) -> Result:
    """Return the run in a folder, also one that still goes on.

    >>> load_run("nowhere")
    Traceback (most recent call last):
    ...
    megarl.errors.DataError: nowhere: not the folder of a run: it has no events.jsonl
    """
    return Result(Path(path))


class _Watching:
    """A sink that shows the run and passes finished steps on. Keeps the first error of the user's function."""

    def __init__(self, display: Sink | None, on_step: Callable[[StepSummary], object] | None) -> None:
        self._display = display
        self._on_step = on_step
        self.error: Exception | None = None

    def record(self, record: Record) -> None:
        if self._display is not None:
            self._display.record(record)
        if isinstance(record.event, StepFinished) and self._on_step is not None and self.error is None:
            try:
                self._on_step(record.event.summary)
            except Exception as error:  # noqa: BLE001 - the user's own; raised again when the run has ended
                self.error = error
                interrupt()

    def close(self) -> None:
        if self._display is not None:
            self._display.close()


def _display() -> Sink:
    return NotebookDisplay() if is_notebook() else make_display(make_console())


def _call(function: Callable[[], None]) -> None:
    """Call a function that runs its own event loop; in a thread where one runs already, as in a notebook."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        function()
        return
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(function)
        while not running.done():
            try:
                running.result()
            except KeyboardInterrupt:
                if not interrupt():
                    raise
    running.result()


def code_keys(own: Mapping[str, OwnCode], run: RunConfig) -> dict[str, JsonValue]:
    """Return the keys of a recipe that refer to the user's functions, which are given by part of the step."""
    if "reward" in own and "scorer" in own:
        raise ConfigError(run.name, (Problem(key="reward", message="give a reward or a scorer, not both"),))
    changes: dict[str, JsonValue] = {}
    for part, code in own.items():
        reference = code if isinstance(code, str) else _reference(code, part, run)
        place, _, name = reference.rpartition(":")
        keys: dict[str, dict[str, JsonValue]] = {
            "reward": {"reward": {"kind": "function", "path": place, "name": name}},
            "scorer": {"reward": {"kind": "scorer", "code": reference}},
            "environment": {"environment.kind": "class", "environment.path": place, "environment.name": name},
            "estimator": {"algorithm.estimator": reference},
            "loss": {"algorithm.loss": {"kind": "function", "code": reference}},
            "keeps": {"algorithm.filter.code": reference},
            "generator": {"sampling.generator": reference},
        }
        changes |= keys[part]
    return changes


def _reference(code: Callable[..., object], part: str, run: RunConfig) -> str:
    """Return `file.py:name`: where the function is defined or, without such a place, a file that holds it."""
    module = inspect.getmodule(code)
    name = getattr(code, "__qualname__", "<unnamed>")
    file = getattr(module, "__file__", None)
    is_found = module is not None and getattr(module, name, None) is code
    if is_found and file is not None and module is not None and module.__name__ != "__main__":
        return f"{file}:{name}"
    path = _own_folder(run.folder.absolute() / _CODE_FOLDER) / f"{run.name}_{part}.py"
    _resolve_types(code)
    # A script is not imported again: that would start the run a second time.
    held = base64.b64encode(dill.dumps(code, recurse=True)).decode()
    _write_own(
        path,
        f'"""Written by megarl.train: {name}, as {part} of {run.name}."""\n\n'
        f'import base64\n\nimport dill\n\n{part} = dill.loads(base64.b64decode("{held}"))\n',
    )
    return f"{path}:{part}"


def _own_folder(folder: Path) -> Path:
    """Return the folder, which only its owner may write: what lies there is unpickled, so it may do anything."""
    with writing(folder):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.lstat()
    if status.st_uid != os.getuid() or stat.S_ISLNK(status.st_mode) or status.st_mode & 0o022:
        raise MachineError(f"{folder}: others may write there what this run would execute; remove it, or chmod 700")
    return folder


def _write_own(path: Path, text: str) -> None:
    partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    with writing(path):
        with os.fdopen(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(text)
        partial.replace(path)


def _resolve_types(code: Callable[..., object]) -> None:
    """Replace types of a class's methods that are written as strings: the names in them do not travel with it."""
    for function in vars(code).values() if inspect.isclass(code) else ():
        if inspect.isfunction(function):
            with suppress(NameError):  # a name for type checkers only; the environment's check tells of it
                function.__annotations__ = inspect.get_annotations(function, eval_str=True)


__all__: Sequence[str] = ("PlanAnswer", "Recipe", "Result", "StepSummary", "load", "load_run", "plan", "train")
