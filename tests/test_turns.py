"""An episode is credited and trained alike, however its tokens are cut into rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import Tensor

from megarl.algo.algorithm import PolicyGradient
from megarl.algo.loss import PolicyTokens, Segments
from megarl.algo.objective import actor_loss
from megarl.config.algorithm import (
    CispoLossConfig,
    EstimatorConfig,
    GaeConfig,
    GmpoLossConfig,
    GroupConfig,
    GrpoConfig,
    GspoLossConfig,
    PpoLossConfig,
    ReinforcePpConfig,
    SapoLossConfig,
    TisConfig,
)
from megarl.data.packing import Packing
from megarl.data.shares import make_shares, unpack
from megarl.errors import DataError, RewardError
from megarl.tokens import SampleColumn, by_sample
from megarl.types import (
    DEMONSTRATION,
    Ending,
    Episode,
    Estimates,
    MicroBatch,
    MiniBatch,
    Rollout,
    RolloutGroup,
    Score,
    ScoredGroup,
    TrainSample,
    Turn,
    TurnKind,
)
from tests.values import make_prompt, make_rollout

EPISODES_PER_STEP = 40
GROUP = 4
TOLERANCE = 1e-6
PACKING = Packing(
    data_parallel=1, tokens_per_micro_batch=90, samples_per_update=None, pad_multiple=1, micro_batch_multiple=1
)

PPO = PpoLossConfig(kind="ppo")
ALGORITHMS: tuple[EstimatorConfig, ...] = (
    GrpoConfig(kind="grpo", loss=PPO),
    GrpoConfig(kind="grpo", loss=PPO, aggregation="seq_mean_token_mean"),
    GrpoConfig(kind="grpo", loss=PPO, aggregation="seq_mean_token_sum", normalize_std=False),
    GrpoConfig(kind="grpo", loss=PPO, aggregation="seq_mean_token_sum_norm", horizon_tokens=32),
    GrpoConfig(kind="grpo", loss=GspoLossConfig(kind="gspo"), aggregation="seq_mean_token_mean"),
    GrpoConfig(kind="grpo", loss=GmpoLossConfig(kind="gmpo"), aggregation="seq_mean_token_mean"),
    GrpoConfig(kind="grpo", loss=PPO, correction=TisConfig(kind="tis", level="sequence")),
    GroupConfig(kind="rloo", loss=CispoLossConfig(kind="cispo")),
    GroupConfig(kind="opo", loss=SapoLossConfig(kind="sapo"), entropy_coef=0.01),
    GroupConfig(kind="gpg", aggregation="token_sum"),
    GroupConfig(kind="reinforce_pp_baseline", correction=TisConfig(kind="tis")),
    GroupConfig(kind="grpo_passk"),
    ReinforcePpConfig(kind="reinforce_pp", gamma=0.97),
    GaeConfig(kind="gae", gamma=0.99, lam=0.9),
)


@dataclass(frozen=True)
class Attempt:
    """One episode, and where each of its tokens is in the rollout that carries it."""

    rollout: Rollout
    places: tuple[int, ...]


def draw_attempt(random: np.random.Generator) -> tuple[Attempt, tuple[int, ...]]:
    """Return an episode in one row, and the starts of its sampled turns after the first."""
    turns: list[Turn] = []
    place = 0
    for number in range(int(random.integers(1, 5))):
        if number:
            length = int(random.integers(1, 5))
            turns.append(Turn(start=place, end=place + length, kind=TurnKind.GIVEN))
            place += length
        length = int(random.integers(1, 6))
        reward = float(random.normal()) if random.random() < 0.4 else 0.0
        turns.append(Turn(start=place, end=place + length, kind=TurnKind.SAMPLED, reward=reward, versions=(3, 3)))
        place += length
    mask = np.zeros(place, np.bool_)
    for turn in turns:
        mask[turn.start : turn.end] = turn.kind is TurnKind.SAMPLED
    rollout = make_rollout(
        random.integers(1, 1000, place),
        logprobs=np.where(mask, -random.random(place), 0).astype(np.float32),
        loss_mask=mask,
        episode=Episode(turns=tuple(turns), ending=Ending.ANSWERED),
    )
    rollout = replace(rollout, versions=np.where(mask, 3, DEMONSTRATION).astype(np.int32))
    starts = tuple(turn.start for turn in turns[1:] if turn.kind is TurnKind.SAMPLED)
    return Attempt(rollout, tuple(range(place))), starts


def draw_tokens(random: np.random.Generator, rollout: Rollout) -> tuple[float, ...] | None:
    """Return rewards of the tokens that the policy chose, for some rollouts, and most of them 0."""
    size = int(rollout.loss_mask.sum())
    return tuple(np.where(random.random(size) < 0.3, random.normal(size=size), 0)) if random.random() < 0.3 else None


def split(attempt: Attempt, cuts: Sequence[int], prompt_ids: np.ndarray) -> Attempt:
    """Return the episode with a new row, which repeats the history as its context, at each of the cuts."""
    whole = attempt.rollout
    content = whole.content.load()
    history = np.concatenate([prompt_ids, content.token_ids])
    ids: list[np.ndarray] = []
    logprobs, mask, rows = [], [], []
    places: list[int] = []
    bounds = [0, *cuts, whole.num_tokens]
    for number, (start, end) in enumerate(pairwise(bounds)):
        context = history[: len(prompt_ids) + start] if number else history[:0]
        num_before = sum(len(part) for part in ids)
        if number:
            rows.append(num_before)
        places += range(num_before + len(context), num_before + len(context) + end - start)
        ids.append(np.concatenate([context, content.token_ids[start:end]]))
        logprobs.append(np.concatenate([np.zeros(len(context), np.float32), content.logprobs[start:end]]))
        mask.append(np.concatenate([np.zeros(len(context), np.bool_), whole.loss_mask[start:end]]))
    turns = tuple(
        replace(turn, start=places[turn.start], end=places[turn.end - 1] + 1)
        for turn in whole.episode.turns
        if turn.kind is TurnKind.SAMPLED
    )
    loss_mask = np.concatenate(mask)
    rollout = make_rollout(
        np.concatenate(ids),
        logprobs=np.concatenate(logprobs),
        loss_mask=loss_mask,
        episode=Episode(rows=tuple(rows), turns=turns, ending=Ending.ANSWERED),
    )
    rollout = replace(rollout, versions=np.where(loss_mask, 3, DEMONSTRATION).astype(np.int32))
    return Attempt(rollout, tuple(places))


def draw_step(seed: int) -> tuple[list[ScoredGroup], list[ScoredGroup], list[Attempt], list[Attempt]]:
    """Return the same episodes in one row each and in several, as groups and as attempts."""
    random = np.random.default_rng(seed)
    groups: tuple[list[ScoredGroup], list[ScoredGroup]] = ([], [])
    attempts: tuple[list[Attempt], list[Attempt]] = ([], [])
    for number in range(EPISODES_PER_STEP // GROUP):
        prompt = make_prompt(number, token_ids=random.integers(1, 1000, int(random.integers(1, 6))), file="p")
        drawn = [draw_attempt(random) for _ in range(GROUP)]
        wholes = [attempt for attempt, _ in drawn]
        parts = [
            split(attempt, [start for start in starts if random.random() < 0.6], prompt.token_ids)
            for attempt, starts in drawn
        ]
        scores = tuple(
            Score(value=float(random.integers(0, 3)), components={}, tokens=draw_tokens(random, attempt.rollout))
            for attempt in wholes
        )
        for side, members in enumerate((wholes, parts)):
            rollouts = tuple(attempt.rollout for attempt in members)
            groups[side].append(ScoredGroup(group=RolloutGroup(prompt=prompt, rollouts=rollouts), scores=scores))
            attempts[side].extend(members)
    return *groups, *attempts


def samples_of(
    config: EstimatorConfig, groups: Sequence[ScoredGroup], attempts: Sequence[Attempt]
) -> list[TrainSample]:
    def values(seed: int, attempt: Attempt) -> np.ndarray:
        numbers = np.zeros(attempt.rollout.num_tokens, np.float32)
        numbers[list(attempt.places)] = np.random.default_rng(seed).normal(size=len(attempt.places))
        return numbers

    estimates = Estimates(values=tuple(values(i, attempt) for i, attempt in enumerate(attempts)))
    algorithm = PolicyGradient(config, max_response_tokens=1000)
    return algorithm.assign(groups, estimates if isinstance(config, GaeConfig) else Estimates())


def mini_batches(samples: Sequence[TrainSample], config: EstimatorConfig, seed: int) -> Iterator[list[MiniBatch]]:
    """Yield the shares of all ranks of each update."""
    is_cut_up = seed // 2 % 2 == 1
    packing = replace(
        PACKING,
        data_parallel=1 + seed % 3,
        tokens_per_micro_batch=120 if is_cut_up else 90 + seed % 40,
        samples_per_update=None if seed % 2 else 3 * GROUP,
        # Multiples of 4 are those of context parallelism over two ranks.
        pad_multiple=4 if is_cut_up else 1 + seed % 4,
        sequence_multiple=4 if is_cut_up else 1,
        keeps_episodes=config.needs.sums_over_episodes,
    )
    batches = [share.fill() for share in make_shares(samples, packing, temperature=1.0)]
    yield from map(list, zip(*(batch.mini_batches for batch in batches), strict=True))


def chosen_tokens(item: MicroBatch, attempts: Sequence[Attempt]) -> Iterator[tuple[int, int, int, int]]:
    """Yield position, start of its sequence, episode and token of the whole episode for every loss token."""
    place_of = [{place: token for token, place in enumerate(attempt.places)} for attempt in attempts]
    firsts = np.zeros(len(item.sample_ids), np.int32) if item.rows is None else item.rows.firsts
    for index, sample_id in enumerate(item.sample_ids.tolist()):
        start, first = int(item.sequence_starts[index]), int(item.response_starts[index])
        for position in range(first, int(item.sequence_starts[index + 1])):
            if sample_id >= 0 and item.loss_mask[position]:
                yield position, start, sample_id, place_of[sample_id][int(firsts[index]) + position - first]


def gradients(
    config: EstimatorConfig, samples: Sequence[TrainSample], attempts: Sequence[Attempt], seed: int
) -> tuple[list[float], list[Tensor]]:
    """Return the loss of each update, and its gradient by the log-probability of each episode's tokens."""
    random = torch.Generator().manual_seed(seed)
    leaves = [
        (-torch.rand(len(attempt.places), generator=random, dtype=torch.float64)).requires_grad_()
        for attempt in attempts
    ]
    losses = []
    for shares in mini_batches(samples, config, seed):
        total = torch.zeros((), dtype=torch.float64)
        for mini_batch in shares:
            for item in mini_batch.micro_batches:
                total = total + _loss(config, item, mini_batch, leaves, attempts)
        losses.append(float(total.detach()))
        total.backward()  # type: ignore[no-untyped-call]
    return losses, [leaf.grad if leaf.grad is not None else torch.zeros_like(leaf) for leaf in leaves]


def _loss(
    config: EstimatorConfig, item: MicroBatch, share: MiniBatch, leaves: Sequence[Tensor], attempts: Sequence[Attempt]
) -> Tensor:
    num_tokens = len(item.token_ids)
    chosen = list(chosen_tokens(item, attempts))
    assert len(chosen) == int(item.loss_mask.sum())
    logprobs = torch.zeros(num_tokens, dtype=torch.float64)
    if chosen:
        taken = torch.stack([leaves[episode][token] for _, _, episode, token in chosen])
        logprobs = logprobs.index_put((torch.tensor([position for position, *_ in chosen]),), taken)
    rollout_logprobs = torch.from_numpy(item.rollout_logprobs).double()
    rows = item.rows
    starts = torch.from_numpy(item.sequence_starts if rows is None else rows.episode_starts)
    counts = None if rows is None else torch.from_numpy(rows.num_loss_tokens)
    tokens = PolicyTokens(
        logprobs=logprobs,
        entropy=logprobs * 0.5,
        old_logprobs=rollout_logprobs * 1.1,
        rollout_logprobs=rollout_logprobs,
        advantages=torch.from_numpy(item.advantages).double(),
        segments=Segments.of(torch.from_numpy(item.loss_mask), starts, counts),
    )
    return actor_loss(config, tokens, num_loss_tokens=share.num_loss_tokens, num_sequences=share.num_sequences).value


@pytest.mark.patient
@pytest.mark.parametrize("num_episodes", [1_120, pytest.param(10_000, marks=pytest.mark.slow)])
def test_no_split_into_rows_changes_advantages_or_gradient(num_episodes: int) -> None:
    num_split = 0
    for seed in range(num_episodes // EPISODES_PER_STEP):
        config = ALGORITHMS[seed % len(ALGORITHMS)]
        whole_groups, split_groups, wholes, splits = draw_step(seed)
        num_split += sum(bool(attempt.rollout.episode.rows) for attempt in splits)
        one, other = samples_of(config, whole_groups, wholes), samples_of(config, split_groups, splits)
        for left, right, whole, parts in zip(one, other, wholes, splits, strict=True):
            assert not right.advantages[~parts.rollout.loss_mask].any()
            assert np.abs(left.advantages - right.advantages[list(parts.places)]).max() <= TOLERANCE
            assert whole.rollout.loss_mask.sum() == parts.rollout.loss_mask.sum()
        losses, grads = gradients(config, one, wholes, seed)
        split_losses, split_grads = gradients(config, other, splits, seed)
        assert losses == pytest.approx(split_losses, abs=TOLERANCE), (seed, config.kind)
        worst = max(float((left - right).abs().max()) for left, right in zip(grads, split_grads, strict=True))
        assert worst <= TOLERANCE, (seed, config.kind, config.loss.kind, worst)
    assert num_split > num_episodes / 4


def test_every_trained_token_of_a_row_sees_the_whole_history() -> None:
    for seed in range(20):
        whole_groups, split_groups, wholes, splits = draw_step(seed)
        config = ALGORITHMS[0]
        samples = samples_of(config, split_groups, splits)
        prompts = [scored.group.prompt.token_ids for scored in whole_groups for _ in scored.scores]
        num_seen = 0
        for shares in mini_batches(samples, config, seed):
            for item in (item for share in shares for item in share.micro_batches):
                for position, start, episode, token in chosen_tokens(item, splits):
                    history = np.concatenate([prompts[episode], wholes[episode].rollout.token_ids])
                    assert (
                        item.token_ids[start : position + 1].tolist()
                        == history[: len(prompts[episode]) + token].tolist()
                    )
                    assert item.targets[position] == history[len(prompts[episode]) + token]
                    num_seen += 1
        assert num_seen == sum(int(attempt.rollout.loss_mask.sum()) for attempt in splits)


def test_numbers_of_tokens_come_back_to_the_episode_from_whatever_row_and_rank_computed_them() -> None:
    _, split_groups, _, splits = draw_step(3)
    config = ALGORITHMS[0]
    samples = samples_of(config, split_groups, splits)
    parts: list[SampleColumn] = []
    for share in make_shares(samples, replace(PACKING, data_parallel=3), temperature=1.0):
        batch = share.fill()
        columns = [[item.rollout_logprobs for item in each.micro_batches] for each in batch.mini_batches]
        parts.append(unpack(batch, columns))
    found = by_sample(parts)
    for index, attempt in enumerate(splits):
        mask = attempt.rollout.loss_mask
        assert found[index][mask].tolist() == attempt.rollout.logprobs[mask].tolist()
        assert len(found[index]) == attempt.rollout.num_tokens


def test_a_loss_over_whole_episodes_refuses_rows_that_do_not_fit_together() -> None:
    _, split_groups, _, splits = draw_step(5)
    samples = samples_of(ALGORITHMS[4], split_groups, splits)
    packing = replace(PACKING, tokens_per_micro_batch=45, keeps_episodes=True)
    with pytest.raises(DataError, match="tokens_per_micro_batch"):
        list(make_shares(samples, packing, temperature=1.0))


def test_a_reward_of_a_turn_counts_for_its_tokens_and_those_before_only() -> None:
    turns = (
        Turn(start=0, end=2, kind=TurnKind.SAMPLED, reward=1.0),
        Turn(start=2, end=3, kind=TurnKind.GIVEN),
        Turn(start=3, end=5, kind=TurnKind.SAMPLED),
    )
    mask = np.array([True, True, False, True, True])

    plain = tuple(replace(turn, reward=0.0) for turn in turns)
    rollouts = [make_rollout(range(5), loss_mask=mask, episode=Episode(turns=each)) for each in (turns, plain)]
    group = RolloutGroup(prompt=make_prompt(), rollouts=tuple(rollouts))
    scored = ScoredGroup(group=group, scores=tuple(Score(value=2.0, components={}) for _ in range(2)))
    config = GrpoConfig(kind="grpo", normalize_std=False)
    first, second = PolicyGradient(config, max_response_tokens=10).assign([scored], Estimates())
    # Rewards of the episodes: 1 + 2 and 2, their mean is 2.5. After the first turn 2 are to come in both.
    assert first.advantages.tolist() == [0.5, 0.5, 0.0, -0.5, -0.5]
    assert second.advantages.tolist() == [-0.5, -0.5, 0.0, -0.5, -0.5]


@pytest.mark.parametrize("config", ALGORITHMS, ids=lambda config: config.kind)
def test_rewards_of_last_tokens_are_rewards_of_their_turns(config: EstimatorConfig) -> None:
    by_turns, _, attempts, _ = draw_step(5)
    by_turns = [
        replace(scored, scores=tuple(replace(each, tokens=None) for each in scored.scores)) for scored in by_turns
    ]
    by_tokens = [given_by_tokens(scored, is_of_all=number % 2 == 0) for number, scored in enumerate(by_turns)]
    pairs = zip(samples_of(config, by_turns, attempts), samples_of(config, by_tokens, attempts), strict=True)
    num_rewarded = 0
    for one, other in pairs:
        np.testing.assert_allclose(one.advantages, other.advantages, atol=1e-6)
        num_rewarded += any(turn.reward for turn in one.rollout.episode.turns)
    assert num_rewarded > 10


def given_by_tokens(scored: ScoredGroup, *, is_of_all: bool) -> ScoredGroup:
    """Return the group with the rewards of turns as rewards of tokens: of the chosen ones, or of all."""
    rollouts, scores = [], []
    for rollout, score in zip(scored.group.rollouts, scored.scores, strict=True):
        tokens = np.zeros(rollout.num_tokens)
        for turn in rollout.episode.turns:
            tokens[turn.end - 1] += turn.reward
        plain = tuple(replace(turn, reward=0.0) for turn in rollout.episode.turns)
        rollouts.append(replace(rollout, episode=replace(rollout.episode, turns=plain)))
        scores.append(replace(score, tokens=tuple(tokens if is_of_all else tokens[rollout.loss_mask])))
    return replace(scored, group=replace(scored.group, rollouts=tuple(rollouts)), scores=tuple(scores))


def test_rewards_for_another_number_of_tokens_are_refused() -> None:
    groups, _, attempts, _ = draw_step(0)
    scores = tuple(replace(score, tokens=(0.5,) * 99) for score in groups[0].scores)
    with pytest.raises(
        RewardError, match=r"prompt p:0: the score has 99 rewards in `tokens`, and the policy chose \d+"
    ):
        samples_of(ALGORITHMS[0], [replace(groups[0], scores=scores), *groups[1:]], attempts)
