"""The dashboards on learning: Overview and Trainer."""

from __future__ import annotations

from megarl.observe import catalogue as names
from scripts.dashboards.panels import (
    Dashboard,
    Panel,
    PanelRow,
    formula,
    increase,
    rate,
    value,
)

OVERVIEW = Dashboard(
    uid="megarl-overview",
    title="megarl / Overview",
    text="Is it learning, is it fast, is it healthy?",
    sections=("run", "data", "eval"),
    rows=(
        PanelRow(
            title="Now",
            panels=(
                Panel(title="Step", kind="stat", width=4, height=4, unit="none", queries=(value(names.STEP),)),
                Panel(
                    title="Steps asked for",
                    kind="stat",
                    width=4,
                    height=4,
                    unit="none",
                    queries=(value(names.RUN_STEPS),),
                ),
                Panel(title="Time left", kind="stat", width=4, height=4, unit="s", queries=(value(names.REMAINING),)),
                Panel(
                    title="Accuracy, held out",
                    kind="stat",
                    width=4,
                    height=4,
                    unit="percentunit",
                    queries=(value(names.EVAL, where='number="accuracy"'),),
                ),
                Panel(
                    title="Tokens per second and GPU",
                    kind="stat",
                    width=4,
                    height=4,
                    queries=(formula("megarl_tokens_per_second{run} / megarl_run_gpus{run}", ""),),
                ),
                Panel(
                    title="Effective time (ETTR)",
                    kind="gauge",
                    width=4,
                    height=4,
                    unit="percentunit",
                    max=1,
                    queries=(value(names.EFFECTIVE_TIME),),
                    text="Time of steps that count over all time since the run was first started.",
                ),
            ),
        ),
        PanelRow(
            title="Learning",
            panels=(
                Panel(
                    title="Reward",
                    queries=(
                        value(names.REWARD_MEAN, "mean"),
                        value(names.REWARD_MIN, "min"),
                        value(names.REWARD_MAX, "max"),
                    ),
                ),
                Panel(title="Spread of rewards", queries=(value(names.REWARD_STD, "standard deviation"),)),
                Panel(
                    title="Reward by component",
                    queries=(value(names.REWARD_COMPONENT).needing("components"),),
                    text="One component that rises while the others fall is often one that is being gamed.",
                ),
                Panel(
                    title="Evaluation",
                    queries=(value(names.EVAL),),
                    text="pass@k far above accuracy: the policy can, but does not choose to.",
                ),
                Panel(title="Evaluation by data source", queries=(value(names.EVAL_SOURCE),)),
                Panel(
                    title="Groups without signal",
                    unit="percentunit",
                    max=1,
                    queries=(value(names.ZERO_SIGNAL, "share"),),
                    text="All rewards of a group are equal. Above 80 % little is learned.",
                ),
                Panel(
                    title="Entropy",
                    queries=(value(names.ENTROPY),),
                    text="In nats. It falls slowly; towards 0 the policy has stopped exploring.",
                ),
                Panel(
                    title="KL",
                    is_log=True,
                    queries=(
                        value(names.UPDATE_KL, "of the update"),
                        value(names.REFERENCE_KL, "to the reference").needing("reference"),
                    ),
                ),
                Panel(
                    title="Train/rollout mismatch",
                    is_log=True,
                    queries=(
                        value(names.ENGINE_MISMATCH, "mean |p - p|"),
                        value(names.MISMATCH_BASELINE, "first steps"),
                    ),
                    text="Three times the run's own beginning means that numerics or weights have come apart.",
                ),
            ),
        ),
        PanelRow(
            title="Speed",
            panels=(
                Panel(title="Seconds per step", unit="s", queries=(value(names.STEP_SECONDS),)),
                Panel(
                    title="Where the time goes",
                    unit="percentunit",
                    is_stacked=True,
                    queries=(rate(names.PHASE_SECONDS, where='phase!="start"'),),
                    text="Seconds of each phase per second.",
                ),
                Panel(title="Tokens per second", queries=(value(names.TOKENS_PER_SECOND, "trained"),)),
            ),
        ),
        PanelRow(
            title="What is run",
            panels=(
                Panel(title="Run", kind="table", width=10, height=5, queries=(value(names.RUN_INFO),)),
                Panel(title="Versions", kind="table", width=14, height=5, queries=(value(names.BUILD_INFO),)),
            ),
        ),
    ),
)

TRAINER = Dashboard(
    uid="megarl-trainer",
    title="megarl / Trainer",
    text="Loss, gradients, the policy's distance from others, the critic, and how well the hardware is used.",
    sections=("trainer", "critic", "preference"),
    rows=(
        PanelRow(
            title="Update",
            panels=(
                Panel(title="Loss", queries=(value(names.LOSS),), text="Of policy gradients its size says little."),
                Panel(title="Gradient norm", is_log=True, queries=(value(names.GRAD_NORM),), text="Before clipping."),
                Panel(title="Learning rate", unit="sci", queries=(value(names.LEARNING_RATE),)),
                Panel(
                    title="Clipped and rejected tokens",
                    unit="percentunit",
                    queries=(value(names.CLIP, "clipped"), value(names.REJECTED, "rejected by the correction")),
                ),
                Panel(
                    title="KL of the update",
                    is_log=True,
                    queries=(value(names.UPDATE_KL),),
                    text="In nats. Above 0.1 a step has gone too far.",
                ),
                Panel(
                    title="Updates skipped, last hour",
                    queries=(increase(names.SKIPPED_UPDATES),),
                    text="Loss or gradient was not finite. After three in a row the run ends.",
                ),
            ),
        ),
        PanelRow(
            title="Trainer against engines",
            panels=(
                Panel(
                    title="|p_train - p_rollout|",
                    is_log=True,
                    queries=(
                        value(names.MISMATCH_MEAN, "mean"),
                        value(names.MISMATCH_MAX, "largest"),
                        value(names.MISMATCH_BASELINE, "mean of the first steps"),
                        value(names.ENGINE_MISMATCH, "tokens of the trained version"),
                        value(names.POLICY_DRIFT, "tokens of earlier versions").needing("staleness"),
                    ),
                ),
                Panel(
                    title="Tokens of earlier versions",
                    unit="percentunit",
                    queries=(value(names.BEHIND, "share of loss tokens"),),
                ),
                Panel(
                    title="Experts of the engine",
                    unit="percentunit",
                    queries=(value(names.REPLAYED, "share of positions").needing("mixture"),),
                    text="Tokens that are predicted with the experts that the engine chose (train.routing).",
                ),
                Panel(
                    title="Other experts without replay",
                    unit="percentunit",
                    queries=(value(names.ROUTING_DISAGREEMENT, "layer").needing("mixture"),),
                    text="Share of replayed tokens that the trainer's own router had sent elsewhere, by layer.",
                ),
                Panel(
                    title="KL(rollout || train)",
                    queries=(value(names.MISMATCH_KL, "k1"), value(names.MISMATCH_K3, "k3")),
                ),
                Panel(
                    title="chi2 and effective samples",
                    queries=(
                        value(names.MISMATCH_CHI2, "chi2"),
                        value(names.EFFECTIVE_SAMPLES, "effective share"),
                    ),
                ),
            ),
        ),
        PanelRow(
            title="Reference and critic",
            panels=(
                Panel(
                    title="Distance from the reference",
                    queries=(
                        value(names.REFERENCE_KL, "KL").needing("reference"),
                        value(names.KL_COEFFICIENT, "cost").needing("reference"),
                    ),
                ),
                Panel(
                    title="Critic: loss and gradient norm",
                    queries=(
                        value(names.VALUE_LOSS, "loss").needing("critic"),
                        value(names.VALUE_GRAD_NORM, "gradient norm").needing("critic"),
                        value(names.VALUE_LEARNING_RATE, "learning rate").needing("critic"),
                    ),
                ),
                Panel(
                    title="Critic: values and returns",
                    queries=(
                        value(names.VALUE_MEAN, "value").needing("critic"),
                        value(names.RETURN_MEAN, "return").needing("critic"),
                        value(names.EXPLAINED_VARIANCE, "explained variance").needing("critic"),
                        value(names.VALUE_CLIP, "clipped share").needing("critic"),
                    ),
                    text="Explained variance near 1: the critic knows. At 0 or below it is no use.",
                ),
            ),
        ),
        PanelRow(
            title="Pairs of answers",
            panels=(
                Panel(
                    title="Pairs in the right order",
                    unit="percentunit",
                    max=1,
                    queries=(value(names.PAIR_ACCURACY).needing("pairs"),),
                    text="Before a policy differs from its reference, none is; half of them is chance.",
                ),
                Panel(
                    title="Implicit rewards",
                    queries=(
                        value(names.CHOSEN_REWARD, "chosen").needing("pairs"),
                        value(names.REJECTED_REWARD, "rejected").needing("pairs"),
                        value(names.PAIR_MARGIN, "margin").needing("pairs"),
                    ),
                    text="Both fall where a policy learns only to avoid the rejected answers.",
                ),
                Panel(
                    title="Loss and number of pairs",
                    queries=(
                        value(names.PAIR_LOSS, "loss").needing("pairs"),
                        value(names.PAIRS, "pairs").needing("pairs"),
                    ),
                ),
            ),
        ),
        PanelRow(
            title="Work",
            panels=(
                Panel(
                    title="Model FLOP per second",
                    queries=(value(names.TRAIN_FLOPS),),
                    text="Forward and backward of the model; what is computed twice to save memory does not count.",
                ),
                Panel(title="MFU", unit="percentunit", max=1, queries=(value(names.MFU).needing("gpu"),)),
                Panel(
                    title="Tokens computed, of those trained on",
                    unit="percentunit",
                    max=1,
                    queries=(value(names.COMPUTED),),
                    text="The others begin a row as another one begins: they are computed once (train.share_prefixes).",
                ),
                Panel(
                    title="Size of a step",
                    queries=(
                        value(names.LOSS_TOKENS, "loss tokens"),
                        value(names.MICRO_BATCHES, "micro-batches per rank"),
                    ),
                ),
                Panel(title="Tokens trained on", queries=(value(names.TRAINED_TOKENS),)),
                Panel(title="Prompts trained on", queries=(value(names.TRAINED_PROMPTS),)),
                Panel(
                    title="Data",
                    unit="none",
                    queries=(
                        value(names.EPOCH, "epochs read"),
                        value(names.DATA_PROMPTS, "prompts"),
                        value(names.DATA_DROPPED, "prompts too long"),
                    ),
                ),
            ),
        ),
    ),
)
