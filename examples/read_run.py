"""Read a run as tables: numbers by step, kept rollouts, answers of an evaluation. By default that of own_reward.py."""

import sys
from pathlib import Path

import megarl

if __name__ == "__main__":
    run = megarl.load_run(Path(sys.argv[1] if len(sys.argv) > 1 else "runs/own_reward"))
    print(run, "with", run.recipe.algorithm.kind)
    # With pandas: run.metrics().to_pandas()
    for row in run.metrics().select(["step", "rollouts.reward_mean", "update.entropy", "seconds"]).to_pylist():
        print(row)
    rollouts = run.rollouts()
    print(f"{rollouts.num_rows} rollouts were kept, with {', '.join(rollouts.column_names[:6])} ...")
    for answer in run.generations()[:3]:
        print(repr(answer.prompt), "->", repr(answer.response), "right" if answer.is_right else "wrong")
