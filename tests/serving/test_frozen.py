"""Frozen models on engines that run already: a real judge and a real reward model, by their URLs."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path

import httpx
import numpy as np
import pytest

from megarl.cluster.local_ray import private_ray
from megarl.config.model import read_model_shape
from megarl.config.recipe import NetworkConfig, RunConfig
from megarl.config.reward import JudgeRewardConfig, RewardConfig, RewardModelRewardConfig
from megarl.config.roles import EndpointConfig, FrozenRoleConfig, PoolConfig
from megarl.data.tokenizer import load_tokenizer
from megarl.engine.client import EngineClient, EngineEndpoint, EngineKeys
from megarl.engine.fleet import Fleet
from megarl.engine.lifecycle import Ended, RestartPolicy
from megarl.engine.process import EngineProcess
from megarl.errors import EngineError, FleetError, ScoreError
from megarl.observe.events import Noted
from megarl.observe.observer import Observer
from megarl.reward.build import build_scorer
from megarl.rollout.frozen import models_of
from megarl.rollout.task import AnsweredPrompt, RolloutTask, Sampling
from megarl.serving.frozen import ScoredAfterGeneration, SleepingModels, model_version, start_frozen
from megarl.serving.phases import SharedPhases, SleepingFleet
from megarl.tokens import Content
from megarl.tools.quickstart.tiny_model import TinyShape, write_tiny_model
from megarl.types import FinishReason, Prompt, Rollout, RolloutGroup, Score, ScoredGroup
from tests.engine.engines import engine_spec, prompt_of, scripted
from tests.observe.samples import ListSink
from tests.rollout.judged import group_of, written_question
from tests.tiny_models import as_classifier, next_logprobs

TEXTS = ("4", "12", "the rest")


@pytest.fixture(scope="module")
def folder(real_engines: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("judge")
    write_tiny_model(folder / "model", TinyShape(), seed=3)
    return folder


@pytest.fixture(scope="module")
def judge(folder: Path) -> Iterator[FrozenRoleConfig]:
    """A judge that somebody started."""
    spec = replace(engine_spec(folder / "model", folder / "run"), role="judge.tiny")
    process = EngineProcess(replace(spec, has_grammars=True))
    process.start()
    try:
        asyncio.run(process.wait_ready())
        (folder / "key").write_text(process.endpoint.keys.api)
        endpoint = EndpointConfig(url=process.endpoint.url, api_key_file=folder / "key")
        yield FrozenRoleConfig(endpoints=(endpoint,), model=folder / "model")
    finally:
        process.stop()


def scored(
    role: str, config: FrozenRoleConfig, reward: RewardConfig, *texts: str, notes: ListSink | None = None
) -> list[Score]:
    async def score() -> list[Score]:
        observer = Observer([notes] if notes else [])
        run, network = RunConfig(name="test", device="cpu"), NetworkConfig()
        async with AsyncExitStack() as stack:
            started = await start_frozen(
                {role: config}, {}, stack, run=run, network=network, observer=observer, longest_reply=None
            )
            scorer = build_scorer(reward, observer=observer, frozen=models_of(started))
            return list((await scorer.score(group_of(*texts))).scores)

    return asyncio.run(score())


def likeliest(model: Path, text: str) -> tuple[str, int]:
    """Return the answer that transformers finds likeliest after the start of the reply, and the tokens until then."""
    tokenizer = load_tokenizer(model, vocab=read_model_shape(model).vocab)
    question = f'Is {text} right?\n\nReply with JSON: {{"answer": ...}}, the answer one of ["yes", "no"].'
    start = tokenizer.render_chat([{"role": "user", "content": question}]) + '{"answer": "'
    begun, yes, no = (each.tolist() for each in tokenizer.encode([start, "yes", "no"]))
    expected = next_logprobs(model, begun)
    return "yes" if expected[yes[0]] > expected[no[0]] else "no", len(begun)


def test_a_judge_writes_the_answer_that_transformers_finds_likeliest(judge: FrozenRoleConfig) -> None:
    notes = ListSink()
    scores = scored("judge.tiny", judge, written_question(max_tokens=40), *TEXTS, notes=notes)
    for text, score in zip(TEXTS, scores, strict=True):
        answer, num_begun = likeliest(judge.model, text)
        assert (score.prediction, score.value) == (answer, float(answer == "yes"))
        # With its answer, the closing mark, the brace and the end token.
        assert score.components == {"judge_tokens": float(num_begun + len(answer) + 3)}
    text = f"roles.judge.tiny is {judge.model}, version {model_version(judge.model)}"
    assert notes.events == [Noted(text=text)]


def test_a_judge_reasons_before_its_answer_and_one_that_is_cut_has_no_score(judge: FrozenRoleConfig) -> None:
    reasoned = written_question(max_tokens=80, max_reasoning_chars=8, max_attempts=1)
    (score,) = scored("judge.tiny", judge, reasoned, "4")
    assert score.prediction in ("yes", "no")
    with pytest.raises(ScoreError, match=r"answered '\{\"answer\"', .* cut off at 9 tokens .*, 3 times"):
        scored("judge.tiny", judge, written_question(max_tokens=9), "4")


async def test_the_chat_route_of_a_server_gives_the_same_answers(judge: FrozenRoleConfig) -> None:
    (endpoint,) = judge.endpoints
    config = JudgeRewardConfig(
        kind="judge",
        url=f"{endpoint.url}/v1/chat/completions",
        api_key_file=endpoint.api_key_file,
        model="tiny",
        template="Is {response} right?",
        answers={"yes": 1.0, "no": 0.0},
    )

    scored_ = await build_scorer(config).score(group_of(*TEXTS))
    for text, score_ in zip(TEXTS, scored_.scores, strict=True):
        answer, num_begun = likeliest(judge.model, text)
        assert score_.prediction == answer
        assert score_.components == {"judge_tokens": float(num_begun + len(answer) + 3)}


def test_an_engine_that_serves_a_model_of_another_kind_is_refused(
    judge: FrozenRoleConfig, folder: Path, tmp_path: Path
) -> None:
    classifier = as_classifier(folder / "model", tmp_path / "classifier", "qwen2")
    role, config = "reward_model.tiny", judge.model_copy(update={"model": classifier})
    with pytest.raises(EngineError, match=r"serves .*, which is not a sequence classifier \(roles.reward_model.tiny\)"):
        scored(role, config, RewardModelRewardConfig(kind="reward_model"), "4")


def test_nothing_at_a_url_is_one_line(folder: Path) -> None:
    config = FrozenRoleConfig(endpoints=(EndpointConfig(url="http://127.0.0.1:9"),), model=folder / "model")
    with pytest.raises(EngineError, match=r"the engines of roles.judge.tiny.endpoints must be running") as caught:
        scored("judge.tiny", config, written_question(), "4")
    assert "\n" not in str(caught.value)


def test_the_version_of_a_model_changes_with_its_weights(folder: Path, tmp_path: Path) -> None:
    write_tiny_model(tmp_path / "same", TinyShape(), seed=3)
    write_tiny_model(tmp_path / "other", TinyShape(), seed=4)
    assert model_version(tmp_path / "same") == model_version(folder / "model")
    assert model_version(tmp_path / "other") != model_version(folder / "model")


SAMPLING = Sampling(num_rollouts=1, temperature=1.0, top_p=1.0, top_k=None, max_response_tokens=4)
TASK = RolloutTask(sampling=SAMPLING, seed=0)
MEMORY = {"/release_memory_occupation": "releases", "/resume_memory_occupation": "takes"}


class Scene:
    """A rollout engine and a judge on one GPU; `calls` has what happened, in order."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.may_end = asyncio.Event()
        self.rollout, self.judge = self._fleet("rollout"), self._fleet("judge")
        self.phases = SharedPhases(SleepingFleet(self.rollout))
        self.models = SleepingModels([self.judge])
        self.scored = ScoredAfterGeneration(self, self, phases=self.phases, models=self.models)

    def _fleet(self, name: str) -> Fleet:
        def answer(request: httpx.Request) -> httpx.Response:
            if request.url.path in MEMORY:
                tags = " and ".join(json.loads(request.content)["tags"])
                self.calls.append(f"{name} {MEMORY[request.url.path]} {tags}")
            return httpx.Response(200, json={})

        endpoint = EngineEndpoint(
            index=0, host="127.0.0.1", port=30000, tensor=1, device="cuda", keys=EngineKeys(api="a", admin="b")
        )
        client = EngineClient(endpoint, request_timeout_s=5, send=scripted(answer))
        return Fleet([client], max_outstanding=8, publish_timeout_s=5, policy=RestartPolicy(max_restarts=0))

    async def answer(self, prompt: Prompt, task: RolloutTask) -> AnsweredPrompt:
        """Generate, as the rollout workers do; the last prompt ends when it may."""
        self.calls.append(f"generate {prompt.uid}")
        await asyncio.sleep(0.01)
        if prompt.uid == "last":
            await self.may_end.wait()
        if prompt.uid == "lost":
            raise FleetError("no engine is left")
        nothing = Score(value=0.0, components={}, is_masked=True)
        group = RolloutGroup(prompt=prompt, rollouts=(rollout(prompt.uid),))
        if task.baseline is not None:
            group = replace(group, baseline=rollout(f"greedy {prompt.uid}"))
        return AnsweredPrompt(scored=ScoredGroup(group=group, scores=(nothing,)), seconds=0.0)

    async def announce(self) -> None:
        """Nothing to tell."""

    async def lost(self, groups: Sequence[ScoredGroup]) -> list[int]:
        return [len(groups)]

    async def score(self, group: RolloutGroup) -> ScoredGroup:
        async with self.judge.lease():
            text = group.rollouts[0].text
            self.calls.append(f"score {text}")
            if text == "bad":
                raise ScoreError("no score")
            return ScoredGroup(group=group, scores=(Score(value=float(len(text)), components={}),))

    async def ask(self, *uids: str, task: RolloutTask = TASK) -> list[ScoredGroup | BaseException]:
        answers = [self.scored.answer(prompt_of(1, uid=uid), task) for uid in uids]
        found = await asyncio.gather(*answers, return_exceptions=True)
        return [each if isinstance(each, BaseException) else each.scored for each in found]


def rollout(text: str) -> Rollout:
    one = np.zeros(1, np.int32)
    content = Content(token_ids=one, logprobs=one.astype(np.float32), text=text)
    mask = one.astype(bool)
    return Rollout(versions=one, loss_mask=mask, finish_reason=FinishReason.STOP, content=content)


async def sleeping_judge() -> Scene:
    scene = Scene()
    await scene.models.sleep()
    scene.calls.clear()
    return scene


TURN = ["rollout releases kv_cache", "judge takes weights", "judge takes kv_cache"]
END = ["judge releases kv_cache and weights", "rollout takes kv_cache"]


async def test_a_step_is_scored_when_its_last_group_is_generated() -> None:
    scene = await sleeping_judge()
    asking = asyncio.create_task(scene.ask("a", "last", "bb"))
    await asyncio.sleep(0.05)
    assert scene.calls == ["generate a", "generate last", "generate bb"], "scored while another is generated"
    scene.may_end.set()
    found = await asking
    assert [each.scores[0].value for each in found if isinstance(each, ScoredGroup)] == [1.0, 4.0, 2.0]
    assert scene.calls[3:6] == TURN
    assert sorted(scene.calls[6:9]) == ["score a", "score bb", "score last"]
    assert scene.calls[9:] == END


async def test_a_prompt_that_comes_in_a_turn_is_generated_after_it() -> None:
    scene = await sleeping_judge()
    first = asyncio.create_task(scene.ask("a"))
    while TURN[0] not in scene.calls:
        await asyncio.sleep(0)
    await scene.ask("bb")
    await first
    assert scene.calls == ["generate a", *TURN, "score a", *END, "generate bb", *TURN, "score bb", *END]


async def test_a_lost_prompt_and_one_without_a_score_cost_no_other() -> None:
    scene = await sleeping_judge()
    lost, bad, good = await scene.ask("lost", "bad", "good")
    assert isinstance(lost, FleetError)
    assert isinstance(bad, ScoreError)
    assert isinstance(good, ScoredGroup)
    assert scene.calls[-2:] == END


async def test_the_greedy_rollout_of_a_group_is_scored_as_well() -> None:
    scene = await sleeping_judge()
    (found,) = await scene.ask("a", task=replace(TASK, baseline=SAMPLING))
    assert isinstance(found, ScoredGroup)
    assert found.baseline is not None
    assert found.baseline.value == len("greedy a")


async def test_a_run_that_has_ended_takes_no_turn() -> None:
    scene = await sleeping_judge()
    asking = asyncio.create_task(scene.ask("a"))
    while "generate a" not in scene.calls:
        await asyncio.sleep(0)
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    await asyncio.sleep(0.05)
    assert scene.calls == ["generate a"]


async def test_new_trainers_wait_until_a_turn_has_ended() -> None:
    scene = await sleeping_judge()
    asking = asyncio.create_task(scene.ask("a"))
    while TURN[0] not in scene.calls:
        await asyncio.sleep(0)
    await scene.phases.make_room()
    scene.calls.append("trainers start")
    await asking
    assert scene.calls == ["generate a", *TURN, "score a", *END, "rollout releases kv_cache", "trainers start"]


async def test_a_judge_that_died_in_its_sleep_ends_the_wait_with_the_reason() -> None:
    scene = await sleeping_judge()
    scene.judge.report(scene.judge.engines[0], Ended(reason="it was killed"))
    (found,) = await scene.ask("a")
    assert isinstance(found, FleetError)
    assert "it was killed" in str(found)
    assert scene.rollout.is_awake


with private_ray():
    # Ray reads its environment when it is imported, here as in a run.
    from megarl.cluster.cluster import Cluster, Pool, joined
    from megarl.cluster.local_ray import LocalRay, local_ray
    from megarl.reward.build import build_scorer
    from megarl.rollout.frozen import models_of
    from megarl.serving.frozen import start_frozen

NODE_LOST_S = 600.0


@pytest.mark.slow
@pytest.mark.usefixtures("real_ray")
@pytest.mark.fault(
    "loss of the node of a judge's engine, with a spare node in the Ray cluster",
    "the engine starts on the spare node; the judge gives the same scores",
)
def test_the_engines_of_a_frozen_model_leave_a_lost_node(tmp_path: Path) -> None:
    write_tiny_model(tmp_path / "model", TinyShape(), seed=3)

    async def scenario(nodes: LocalRay, cluster: Cluster) -> None:
        pools = {"judge": Pool(cluster.reserve({"judge": PoolConfig(gpus_per_node=1)})["judge"], 1)}
        config = FrozenRoleConfig(pool="judge", model=tmp_path / "model")
        run = RunConfig(name="test", device="cpu", folder=tmp_path)
        observer = Observer([])
        async with AsyncExitStack() as stack:
            started = await start_frozen(
                {"judge.tiny": config},
                pools,
                stack,
                run=run,
                network=NetworkConfig(),
                observer=observer,
                longest_reply=40,
            )
            scorer = build_scorer(written_question(max_tokens=40), observer=observer, frozen=models_of(started))

            async def scores() -> list[Score]:
                return list((await scorer.score(group_of("4", "12"))).scores)

            before = await scores()
            (engine,) = started["judge.tiny"].fleet.engines
            first = engine.client.endpoint.host
            nodes.kill_node(first)
            async with asyncio.timeout(NODE_LOST_S):
                while not (engine.is_live and engine.client.endpoint.host != first):
                    await asyncio.sleep(0.5)
            assert await scores() == before

    with private_ray():
        nodes = LocalRay(device="cpu", log_folder=tmp_path, has_several_nodes=True)
        with local_ray(nodes, num_slots=0):
            for _ in range(2):
                nodes.start_node(num_slots=1)
            nodes.wait_started()
            with joined(nodes.address):
                cluster = Cluster("cpu")
                try:
                    asyncio.run(scenario(nodes, cluster))
                finally:
                    cluster.release()
