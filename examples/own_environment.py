"""An environment of your own: a class of this file, one instance per episode, whose public methods are tools.

Needs `megarl data make calculator --out data/calculator`.
"""

from pathlib import Path
from typing import Any

import megarl

RECIPES = Path(__file__).parents[1] / "recipes"


class Adder:
    def __init__(self, ground_truth: str, **_row: Any) -> None:
        """Take the row of the data set, by name."""
        self.truth = ground_truth
        self.num_calls = 0

    def add(self, a: int, b: int) -> str:
        """Add two numbers."""
        self.num_calls += 1
        return str(a + b)

    def score(self, transcript: Any) -> dict[str, float]:
        """Return 1 for the right sum, else a little for a call. Each further entry becomes a curve."""
        is_right = transcript.last_text.strip() == self.truth
        return {"score": 1.0 if is_right else 0.1 * (self.num_calls > 0), "calls": float(self.num_calls)}


if __name__ == "__main__":
    result = megarl.train(
        RECIPES / "quickstart_tools.yaml",
        set={
            "run.name": "own_environment",
            "run.steps": 1,
            "model.path": "data/calculator/model",  # random weights: `recipes/quickstart_tools_sft.yaml` gives a start
            "train.prompts_per_step": 4,
            "evaluation": None,
            "data.eval": [],
        },
        environment=Adder,
    )
    print("mean reward:", result.history.reward.values)
