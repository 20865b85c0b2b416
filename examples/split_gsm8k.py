"""GSM8K's training problems in two parts that share none: those to imitate, and those to be rewarded for.

    megarl data prepare gsm8k --from openai/gsm8k --out data/gsm8k
    python examples/split_gsm8k.py data/gsm8k

A policy that imitated the solution of a problem already knows it: its rewards tell little of what it can do. The
first part is every third problem, the second what is left with at most four calculations. The ground truth of the
second is the whole solution, which `gsm8k_steps.py` compares with.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

_MAX_CALCULATIONS = 4


def main(folder: Path) -> None:
    if not (folder / "train.parquet").is_file():
        sys.exit(f"{folder / 'train.parquet'} does not exist: megarl data prepare gsm8k --from SOURCE --out {folder}")
    rows = pq.read_table(folder / "train.parquet")
    is_third = pa.array([place % 3 == 0 for place in range(len(rows))])
    is_short = pc.less_equal(pc.count_substring(rows["response"], "<<"), _MAX_CALCULATIONS)
    for name, chosen in (("imitate", is_third), ("reward", pc.and_(pc.invert(is_third), is_short))):
        part = rows.filter(chosen)
        if name == "reward":
            truths = [{"style": "rule", "ground_truth": solution} for solution in part["response"].to_pylist()]
            place = part.schema.get_field_index("reward_model")
            part = part.set_column(place, "reward_model", pa.array(truths))
        pq.write_table(part, folder / f"{name}.parquet")
        print(f"{folder / name}.parquet: {len(part)} problems")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
