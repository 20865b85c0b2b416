"""The dashboards on what surrounds the trainer: Rollout, and Operations for people who run clusters."""

from __future__ import annotations

from megarl.observe import catalogue as names
from scripts.dashboards.panels import (
    Dashboard,
    Panel,
    PanelRow,
    formula,
    increase,
    mean,
    of_engine,
    quantile,
    rate,
    value,
)

ROLLOUT = Dashboard(
    uid="megarl-rollout",
    title="megarl / Rollout",
    text="What the policy writes, who scores it, and how long it takes.",
    sections=("reward", "rollout"),
    rows=(
        PanelRow(
            title="Responses",
            panels=(
                Panel(
                    title="Length",
                    queries=(
                        value(names.RESPONSE_MEAN, "response, mean"),
                        value(names.RESPONSE_MAX, "response, longest"),
                        value(names.PROMPT_TOKENS, "prompt, mean"),
                    ),
                ),
                Panel(
                    title="Cut off or empty",
                    unit="percentunit",
                    queries=(value(names.TRUNCATED, "cut off"), value(names.EMPTY, "at most one token")),
                ),
                Panel(
                    title="Repetition",
                    unit="percentunit",
                    queries=(value(names.REPETITION),),
                    text="Share of 4-token windows seen before in the same response.",
                ),
            ),
        ),
        PanelRow(
            title="Generating",
            panels=(
                Panel(
                    title="Generated per second",
                    queries=(rate(names.GENERATED_TOKENS, "tokens"), rate(names.GENERATED_ROLLOUTS, "rollouts")),
                    is_log=True,
                ),
                Panel(
                    title="Time of a group",
                    unit="s",
                    queries=(
                        quantile(names.GROUP_SECONDS, 0.5),
                        quantile(names.GROUP_SECONDS, 0.99),
                        mean(names.GROUP_SECONDS),
                    ),
                ),
                Panel(
                    title="Slowest over median group",
                    queries=(value(names.GROUP_TAIL),),
                    text="The tail that a synchronous step waits for.",
                ),
                Panel(title="Requests sent again, last hour", queries=(increase(names.RETRIES),)),
                Panel(title="Groups dropped, last hour", queries=(increase(names.DROPPED_GROUPS),)),
            ),
        ),
        PanelRow(
            title="Between generator and trainer",
            panels=(
                Panel(
                    title="Groups",
                    queries=(
                        value(names.QUEUE, "waiting"),
                        value(names.UNDER_WAY, "under way"),
                        value(names.QUEUE_CAPACITY, "at most"),
                    ),
                ),
                Panel(
                    title="Who waits for whom",
                    unit="percentunit",
                    max=1,
                    queries=(value(names.TRAINER_WAIT, "trainer"), value(names.PRODUCER_WAIT, "producers")),
                    text="Share of a step. In a synchronous run the trainer waits while rollouts are made.",
                ),
                Panel(
                    title="Age of trained tokens",
                    unit="none",
                    queries=(
                        value(names.STALENESS_MEAN, "mean"),
                        value(names.STALENESS_MAX, "oldest"),
                        value(names.STALENESS_LIMIT, "allowed"),
                    ),
                    text="In steps.",
                ),
            ),
        ),
        PanelRow(
            title="Reward",
            panels=(
                Panel(
                    title="Time to score a rollout",
                    unit="s",
                    queries=(
                        quantile(names.REWARD_SECONDS, 0.5),
                        quantile(names.REWARD_SECONDS, 0.99),
                        mean(names.REWARD_SECONDS),
                    ),
                ),
                Panel(title="Rollouts without a score, last hour", queries=(increase(names.REWARD_FAILURES),)),
                Panel(
                    title="Masked rollouts and outliers, last hour",
                    queries=(increase(names.MASKED_ROLLOUTS, "masked"), increase(names.REWARD_OUTLIERS, "outliers")),
                ),
                Panel(
                    title="Steps without any signal, last hour",
                    queries=(increase(names.ZERO_SIGNAL_STEPS),),
                ),
                Panel(title="Groups of one rollout", queries=(value(names.SINGLE_GROUPS),)),
            ),
        ),
        PanelRow(
            title="Engines, as SGLang tells",
            panels=(
                Panel(title="Requests running", queries=(of_engine("num_running_reqs"),)),
                Panel(title="Requests waiting", queries=(of_engine("num_queue_reqs"),)),
                Panel(title="Tokens per second", queries=(of_engine("gen_throughput"),)),
                Panel(title="KV cache in use", unit="percentunit", max=1, queries=(of_engine("token_usage"),)),
                Panel(
                    title="Prompt tokens found in the cache",
                    unit="percentunit",
                    max=1,
                    queries=(of_engine("cache_hit_rate"),),
                ),
            ),
        ),
    ),
)

OPERATIONS = Dashboard(
    uid="megarl-operations",
    title="megarl / Operations",
    text="What may stop a run: engines, publishing, checkpoints, memory, disk.",
    sections=("fleet", "publish", "checkpoint", "machine"),
    rows=(
        PanelRow(
            title="Progress",
            panels=(
                Panel(
                    title="Since the last step",
                    unit="s",
                    kind="stat",
                    width=6,
                    height=4,
                    queries=(formula("time() - megarl_last_step_timestamp_seconds{run}", ""),),
                ),
                Panel(
                    title="Since this process began",
                    unit="s",
                    kind="stat",
                    width=6,
                    height=4,
                    queries=(formula("time() - megarl_run_start_timestamp_seconds{run}", ""),),
                ),
                Panel(
                    title="Steps since the newest checkpoint",
                    unit="none",
                    kind="stat",
                    width=6,
                    height=4,
                    queries=(formula("megarl_step{run} - megarl_checkpoint_step{run}", ""),),
                ),
                Panel(
                    title="Evaluated after step",
                    unit="none",
                    kind="stat",
                    width=6,
                    height=4,
                    queries=(value(names.EVAL_STEP),),
                ),
                Panel(
                    title="Warnings, last hour",
                    queries=(increase(names.WARNINGS, "shown"), increase(names.REFUSED_SERIES, "values not exported")),
                ),
                Panel(title="Seconds of an evaluation", unit="s", queries=(value(names.EVAL_SECONDS),)),
                Panel(
                    title="Scrape targets that answer",
                    unit="none",
                    queries=(formula("up{run}", "{{job}} {{instance}}"),),
                ),
            ),
        ),
        PanelRow(
            title="Engines",
            panels=(
                Panel(title="Engines by state", unit="none", is_stacked=True, queries=(value(names.ENGINES),)),
                Panel(title="Requests by engine", queries=(value(names.ENGINE_REQUESTS, "engine"),)),
                Panel(title="Processes started again, last hour", queries=(increase(names.RESTARTS),)),
            ),
        ),
        PanelRow(
            title="Stragglers and excluded nodes",
            panels=(
                Panel(
                    title="Slowest over median",
                    queries=(value(names.SLOWEST),),
                    text="Time of a token in an engine, of a product of matrices on a rank.",
                ),
                Panel(title="Ranks and engines named slow, last hour", queries=(increase(names.STRAGGLERS),)),
                Panel(title="Excluded nodes", unit="none", queries=(value(names.EXCLUDED_NODES),)),
            ),
        ),
        PanelRow(
            title="Weights",
            panels=(
                Panel(
                    title="Versions",
                    unit="none",
                    queries=(
                        value(names.ACTOR_VERSION, "trainer"),
                        value(names.ROLLOUT_VERSION, "published"),
                        value(names.OLDEST_VERSION, "oldest trained"),
                        value(names.ENGINE_VERSION, "engine"),
                    ),
                ),
                Panel(title="Seconds of a publish", unit="s", queries=(value(names.PUBLISH_SECONDS),)),
                Panel(
                    title="Bytes of a publish",
                    unit="bytes",
                    queries=(
                        value(names.PUBLISH_BYTES, "busiest rank"),
                        value(names.PUBLISH_FLOOR, "floor"),
                        value(names.PUBLISH_TOTAL, "all engines"),
                    ),
                ),
                Panel(
                    title="Publishes, last hour",
                    queries=(increase(names.PUBLISHES, "done"), increase(names.PUBLISH_FAILURES, "failed")),
                ),
                Panel(
                    title="Engines that took the last publish", unit="none", queries=(value(names.PUBLISHED_ENGINES),)
                ),
                Panel(
                    title="Versions of an adapter on one engine",
                    unit="none",
                    queries=(value(names.ADAPTERS, "most"), value(names.MAX_ADAPTERS, "limit")),
                ),
            ),
        ),
        PanelRow(
            title="Checkpoints",
            panels=(
                Panel(
                    title="Age of the newest",
                    unit="s",
                    queries=(formula("time() - megarl_checkpoint_timestamp_seconds{run}", ""),),
                ),
                Panel(
                    title="Seconds of a save",
                    unit="s",
                    queries=(
                        value(names.CHECKPOINT_SECONDS, "whole"),
                        value(names.CHECKPOINT_BLOCKING, "training stood still"),
                    ),
                ),
                Panel(
                    title="Size and space",
                    unit="bytes",
                    is_log=True,
                    queries=(value(names.CHECKPOINT_BYTES, "last one"), value(names.CHECKPOINT_FREE, "free on disk")),
                ),
                Panel(title="Saves that failed, last hour", queries=(increase(names.CHECKPOINT_FAILURES),)),
                Panel(title="Steps between saves", unit="none", queries=(value(names.CHECKPOINT_INTERVAL),)),
            ),
        ),
        PanelRow(
            title="Memory",
            panels=(
                Panel(
                    title="Host memory in use",
                    unit="percentunit",
                    max=1,
                    queries=(
                        formula(
                            "1 - megarl_host_memory_available_bytes{run} / megarl_host_memory_total_bytes{run}",
                            "{{role}}",
                        ),
                    ),
                ),
                Panel(title="Largest process by role", unit="bytes", queries=(value(names.RESIDENT),)),
                Panel(
                    title="GPU memory, fullest rank",
                    unit="bytes",
                    queries=(
                        value(names.GPU_ALLOCATED, "tensors").needing("gpu"),
                        value(names.GPU_RESERVED, "reserved").needing("gpu"),
                        value(names.GPU_TOTAL, "of").needing("gpu"),
                    ),
                ),
            ),
        ),
    ),
)
