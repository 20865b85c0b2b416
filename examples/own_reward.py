"""A reward of your own: a function of this file. Needs `megarl data make arithmetic --out data/arithmetic`."""

from pathlib import Path

import megarl

RECIPES = Path(__file__).parents[1] / "recipes"


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    """1 for the right sum, else a little for an answer that is a number. Each further entry becomes a curve."""
    answer = solution_str.strip()
    is_right = answer == ground_truth
    return {"score": 1.0 if is_right else 0.1 * answer.isdecimal(), "is_number": float(answer.isdecimal())}


def show(summary):
    print(f"step {summary.step}: reward {summary.rollouts.reward_mean:.3f}, {summary.seconds:.1f} s")


if __name__ == "__main__":
    result = megarl.train(
        RECIPES / "quickstart.yaml",
        set={
            "run.name": "own_reward",
            "run.steps": 2,
            "model.path": "data/arithmetic/model",  # random weights: `recipes/quickstart_sft.yaml` gives a start
            "train.prompts_per_step": 8,
            "evaluation.max_prompts": 8,
        },
        reward=compute_score,
        on_step=show,
    )
    print(result)
    print("accuracy by step:", {step: each.accuracy for step, each in result.evaluations.items()})
    print("the model is in", result.model)
