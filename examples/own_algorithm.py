"""An estimator, a loss and a filter of your own. Needs `megarl data make arithmetic --out data/arithmetic`."""

from pathlib import Path

import numpy as np

import megarl

RECIPES = Path(__file__).parents[1] / "recipes"


def centred_rewards(outcomes):
    """Return one advantage per rollout: its reward less the mean of its group (`megarl.algo.advantage.Outcomes`)."""
    totals = np.bincount(outcomes.groups, outcomes.rewards) / np.bincount(outcomes.groups)
    return outcomes.rewards - totals[outcomes.groups]


def plain_ratio_loss(tokens):
    """Return the loss of each token: PPO's ratio without a clip (`megarl.algo.loss.PolicyTokens`)."""
    return -tokens.advantages * (tokens.logprobs - tokens.old_logprobs).exp()


def keeps(group):
    """Train on a group unless all of its responses were cut at the limit (`megarl.types.ScoredGroup`)."""
    return any(rollout.finish_reason == "stop" for rollout in group.group.rollouts)


if __name__ == "__main__":
    result = megarl.train(
        RECIPES / "quickstart.yaml",
        set={
            "run.name": "own_algorithm",
            "run.steps": 1,
            "model.path": "data/arithmetic/model",
            "train.prompts_per_step": 4,
            "algorithm.filter": {"tolerance": 0, "max_dropped_groups": 4096},
            "evaluation": None,
            "data.eval": [],
        },
        # Something that even a random model gets now and then, so that there is something to learn.
        reward=lambda data_source, solution_str, ground_truth: float(sum(map(ord, solution_str)) % 7),
        estimator=centred_rewards,
        loss=plain_ratio_loss,
        keeps=keeps,
    )
    print(result.metrics().select(["step", "update.loss", "rollouts.reward_mean"]).to_pylist())
