"""`python -m tests.simulation`: histories for a while on every core, or one seed with all that happened in it."""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import time

from tests.simulation.campaign import WORLDS, Failure, run_seeds, show


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--world", choices=WORLDS, action="append", help="only this one; by default all")
    parser.add_argument("--seed", type=int, help="show this history of the first world")
    parser.add_argument("--shrink", action="store_true", help="with --seed: fewer accidents, as long as it fails")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--most", type=int, default=1 << 60, help="histories of a process")
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    options = parser.parse_args()
    names = tuple(options.world or WORLDS)
    if options.seed is not None:
        holds, text = show(names[0], options.seed, shrinks=options.shrink)
        sys.stdout.write(f"{text}\n")
        return not holds
    began, count = time.monotonic(), options.processes
    jobs = [(names, options.first + index, count, options.seconds, options.most) for index in range(count)]
    with multiprocessing.get_context("fork").Pool(count) as pool:
        results = pool.starmap(run_seeds, jobs)
    seconds, num_histories = time.monotonic() - began, sum(number for number, _ in results)
    failures = sorted((each for _, found in results for each in found), key=lambda each: each.seed)
    sys.stdout.write(
        f"{num_histories} histories from seed {options.first} on, {num_histories / seconds:.1f} per second, "
        f"{len(failures)} failures\n"
    )
    alike: dict[str, list[Failure]] = {}
    for failure in failures:
        alike.setdefault(failure.signature, []).append(failure)
    for text, found in sorted(alike.items(), key=lambda item: -len(item[1])):
        place = f"--world {found[0].world} --seed {found[0].seed}"
        sys.stdout.write(f"{len(found)} times: {text[:300]}\n    python -m tests.simulation {place} --shrink\n")
    return bool(failures)


if __name__ == "__main__":
    sys.exit(main())
