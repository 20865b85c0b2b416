"""The checks before a run: machine, columns, rows, reward. All that can fail before anything is moved or started.

`find_problems` makes those that need neither the GPUs nor the network of a run; `check_start` makes all of them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import numpy as np
from prometheus_client import CollectorRegistry

from megarl.config.algorithm import AlgorithmConfig
from megarl.config.checks.recipe import check_without_files
from megarl.config.kernels import check_packages
from megarl.config.load import CheckedRecipe
from megarl.config.recipe import DataConfig, NetworkConfig, ObserveConfig, Recipe
from megarl.config.section import Device
from megarl.data.rows import check_files, check_pairs, checked_rows, refuse_bad_rows, row_batches, row_keys
from megarl.engine.admin import check_running
from megarl.episodes.build import rehearse
from megarl.errors import ConfigError, DataError, MachineError, MegarlError, Problem
from megarl.observe.endpoint import MetricsEndpoint
from megarl.planner.deployment import find_shapes
from megarl.planner.fit import check_fit
from megarl.planner.hardware import GPUS, gpu_of
from megarl.reward.build import try_reward
from megarl.run.inputs import Inputs, check_weights, read_inputs, read_shape
from megarl.system.network import LOOPBACK, address_in
from megarl.system.user_code import load_code
from megarl.types import Prompt

_GPU_DEVICES = (Path("/dev/nvidia0"), Path("/dev/nvidiactl"), Path("/dev/dxg"))
"""Present where an NVIDIA driver is loaded; the last one under WSL."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Findings:
    """Result of the checks of a recipe."""

    inputs: Inputs | None
    """None where model, tokenizer or rows cannot be read."""
    errors: tuple[MegarlError, ...]
    unchecked: tuple[str, ...] = ()
    """Requirements that only the machines of the run can be checked for."""

    def raise_errors(self, source: str) -> None:
        """Raise what was found: one error as it is, several as the problems of one ConfigError."""
        others = [error for error in self.errors if not isinstance(error, ConfigError)]
        if len(others) == len(self.errors) == 1:
            raise others[0]
        problems = [problem for error in self.errors for problem in _problems(error)]
        if problems:
            raise ConfigError(source, tuple(dict.fromkeys(problems)))


def _problems(error: MegarlError) -> tuple[Problem, ...]:
    return error.problems if isinstance(error, ConfigError) else (Problem(key="", message=str(error)),)


@contextmanager
def noting(errors: list[MegarlError]) -> Iterator[None]:
    """Add an error of the block to `errors` instead of raising it."""
    try:
        yield
    except MegarlError as error:
        errors.append(error)


def check_start(recipe: Recipe, *, address: str | None, keeps_rows: bool = True) -> Inputs:
    """Check the machine, then model, data and reward; raise everything that is wrong with either.

    `address` is that of the Ray cluster to join. `keeps_rows` as in `read_inputs`.
    """
    # Reading a million rows takes minutes: a missing GPU is reported first.
    Findings(inputs=None, errors=machine_errors(recipe, address)).raise_errors(recipe.run.name)
    findings = _check_inputs(recipe, wrong=(), keeps_rows=keeps_rows)
    findings.raise_errors(recipe.run.name)
    assert findings.inputs is not None, "no inputs, and no error that says why"
    return findings.inputs


def find_problems(checked: CheckedRecipe) -> Findings:
    """Check everything that can be checked on any machine, and name what cannot.

    Parts of the recipe with a problem already are left out: their other problems would be consequences of it.
    """
    recipe = checked.recipe
    errors: list[MegarlError] = [ConfigError(recipe.run.name, checked.problems)] if checked.problems else []
    wrong = {problem.key.partition(".")[0] for problem in (*checked.problems, *checked.not_cached)}
    fit_errors, is_fit_checked = _check_fit(recipe, checked.problems)
    errors += fit_errors
    findings = _check_inputs(recipe, wrong=wrong, keeps_rows=False)
    unchecked = [f"{problem.key}: {problem.message}" for problem in checked.not_cached]
    unchecked += machine_needs(recipe)
    if recipe.run.device != "cpu" and not is_fit_checked:
        unchecked.append("whether it fits its GPUs: set cluster.gpu, and name a model that is here")
    return Findings(inputs=findings.inputs, errors=(*errors, *findings.errors), unchecked=tuple(unchecked))


def machine_errors(recipe: Recipe, address: str | None) -> tuple[MegarlError, ...]:
    """Return what this machine lacks: a GPU, packages, a free port, engines that must run already."""
    errors: list[MegarlError] = []
    with noting(errors):
        refuse_missing_gpu(recipe.run.device, address)
    if packages := tuple(check_packages(recipe.roles, device=recipe.run.device)):
        errors.append(ConfigError(recipe.run.name, packages))
    with noting(errors):
        _try_port(recipe.observe, recipe.network)
    with noting(errors):
        asyncio.run(check_running(recipe.roles.frozen, device=recipe.run.device))
    return tuple(errors)


def machine_needs(recipe: Recipe) -> Iterator[str]:
    """Yield what a run needs of its machines beside files: what `machine_errors` and `train` look for."""
    if recipe.run.device != "cpu":
        is_wide = any(pool.nodes > 1 for pool in recipe.pools.values())
        yield f"{sum(pool.gpus for pool in recipe.pools.values())} GPUs" + " of a Ray cluster" * is_wide
    yield from (
        f"{problem.key}: the package it needs" for problem in check_packages(recipe.roles, device=recipe.run.device)
    )
    if recipe.observe.metrics_port:
        yield f"observe.metrics_port: whether {recipe.observe.metrics_port} is free"
    yield from (
        f"roles.{role}.endpoints: their engines" for role, on in recipe.roles.on_engines.items() if on.endpoints
    )


_SIZE_KEYS = frozenset({"algorithm", "cluster", "model", "pools", "roles", "sampling", "train"})
"""Sections that determine the memory of a run."""


def _check_fit(recipe: Recipe, problems: Collection[Problem]) -> tuple[list[MegarlError], bool]:
    """Return why the run cannot be placed or does not fit its GPUs, and whether that could be computed.

    The shape of a public model is known without its folder. A recipe that names no GPU is tried on the largest one.
    """
    keys = {problem.key for problem in problems} - {"model.path"}
    if recipe.run.device == "cpu" or any(key.partition(".")[0] in _SIZE_KEYS for key in keys):
        return [], True
    try:
        shapes = find_shapes(recipe.model, recipe.roles, algorithm=recipe.algorithm)
    except ConfigError:
        return [], False
    if misplaced := tuple(check_without_files(recipe, shapes.policy, critic=shapes.critic)):
        return [ConfigError(recipe.run.name, misplaced)], True
    errors: list[MegarlError] = []
    gpu = max(GPUS.values(), key=lambda each: each.memory_gib) if recipe.cluster.gpu is None else gpu_of(recipe.cluster)
    with noting(errors):
        check_fit(recipe, gpu)
    return errors, recipe.cluster.gpu is not None


def _check_inputs(recipe: Recipe, *, wrong: Collection[str], keeps_rows: bool) -> Findings:
    """Load the user's code, read model and rows, rehearse the environment and try the reward.

    `wrong` has the sections with known problems. Without a usable model, rows are checked but not tokenised.
    """
    errors: list[MegarlError] = []
    codes = list(recipe.algorithm.needs.user_code)
    if recipe.sampling.generator is not None:
        codes.append(("sampling.generator", recipe.sampling.generator))
    for key, code in codes:
        with noting(errors):
            load_code(code, key=key)
    inputs, needs, wrong = None, recipe.algorithm.needs, set(wrong)
    if "data" not in wrong:
        try:
            check_columns(recipe.data, recipe.algorithm)
        except DataError as error:
            errors.append(error)
            wrong.add("data")
    if "model" not in wrong:
        with noting(errors):
            check_weights(recipe.model.path, read_shape(recipe))
    if not {"model", "data", "environment"} & wrong:
        with noting(errors):
            inputs = read_inputs(recipe, keeps_rows=keeps_rows)
    elif "data" not in wrong:
        with noting(errors):
            _check_rows(recipe.data, recipe.algorithm)
    if inputs is not None and recipe.environment is not None:
        with noting(errors):
            rehearse(recipe.environment, inputs.tokenizer, max_response_tokens=recipe.sampling.max_response_tokens)
    if needs.has_engines and not {"data", "reward"} & wrong:
        with noting(errors):
            prompts = _first_prompts(recipe.data) if inputs is None else (*inputs.train.prompts, *inputs.eval)
            asyncio.run(try_reward(recipe.reward, needs, tuple(prompts)))
    return Findings(inputs=inputs, errors=tuple(errors))


def _check_rows(data: DataConfig, algorithm: AlgorithmConfig) -> None:
    """Raise a DataError for the first bad row of a file; needs no tokenizer."""
    if algorithm.needs.rows == "pairs":
        return  # the two answers of a row are read as two rows, by the tokenizer's reader
    as_demonstrations = algorithm.needs.rows != "prompts"
    for _, batches in groupby(row_batches(data.train, row_keys(data)), key=lambda batch: batch.path):
        refuse_bad_rows(
            [error for batch in batches for error in checked_rows(batch, data, as_demonstrations=as_demonstrations)[1]]
        )


def _first_prompts(data: DataConfig) -> Iterator[Prompt]:
    """Yield the good ones of the first rows of each file, without tokens: rewards read their other fields."""
    for path in data.train:
        batch = next(row_batches([path], row_keys(data)), None)
        rows = [] if batch is None else checked_rows(batch, data, as_demonstrations=False)[0]
        for row in rows:
            yield Prompt(
                uid=row.uid,
                position=0,
                epoch=0,
                token_ids=np.zeros(0, dtype=np.int32),
                data_source=row.data_source,
                ground_truth=row.ground_truth,
                extra_info=row.extra_info,
                messages=row.chat,
            )


def check_columns(data: DataConfig, algorithm: AlgorithmConfig) -> None:
    """Raise a DataError for a file without the columns that a run needs; reads no rows."""
    check_files(data.train, data, as_demonstrations=algorithm.needs.rows != "prompts")
    if algorithm.needs.rows == "pairs":
        check_pairs((*data.train, *data.eval_pairs), data)
    check_files(data.eval, data, as_demonstrations=False)
    check_files((*data.eval_demonstrations, *data.eval_pairs), data, as_demonstrations=True)


def refuse_missing_gpu(device: Device, address: str | None) -> None:
    """Raise MachineError where a private Ray would find no GPU for a run that needs one."""
    if device == "cuda" and address is None and not any(path.exists() for path in _GPU_DEVICES):
        raise MachineError(
            "run.device: cuda, and this machine has no GPU: set run.device: cpu for a small run here, "
            "or join a cluster (RAY_ADDRESS or run.ray_address)"
        )


def _try_port(observe: ObserveConfig, network: NetworkConfig) -> None:
    """Raise MachineError if the metrics port cannot be listened on."""
    if observe.metrics_port:
        host = LOOPBACK if network.bind is None else address_in(network.bind)
        MetricsEndpoint(CollectorRegistry(), port=observe.metrics_port, host=host).close()
