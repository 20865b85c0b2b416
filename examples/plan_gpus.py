"""Ask on a laptop what a recipe needs on a cluster, and which GPUs are enough. Starts nothing, needs no weights."""

from pathlib import Path

import megarl

RECIPES = Path(__file__).parents[1] / "recipes"

if __name__ == "__main__":
    for gpu in ("h100", "h200", "l40s"):
        answer = megarl.plan(RECIPES / "grpo_7b.yaml", gpu=gpu, shape="qwen2.5-7b")
        sizes = answer.plan.sizes
        step = "" if sizes.timing is None else f", a step takes about {sizes.timing.step_s:.0f} s"
        print(f"{gpu}: {'fits' if sizes.fits else f'does not fit: {sizes.excess}'}{step}")
        for proposal in answer.proposals:
            print("   fits with", " ".join(f"--set {assignment}" for assignment in proposal.assignments))
