"""The numbers people watch, for Prometheus: names and units in one place, served on loopback."""

from __future__ import annotations

from threading import Thread
from wsgiref.simple_server import WSGIServer

from prometheus_client import CollectorRegistry, Counter, Gauge, start_http_server

from megarl.errors import MachineError
from megarl.observe.events import (
    CheckpointFailed,
    CheckpointSaved,
    Evaluated,
    Published,
    Record,
    StepFinished,
    Warned,
)
from megarl.observe.summary import RolloutSummary, StepSummary
from megarl.types import CriticStats, EvalResult, PublishResult, UpdateStats

LOOPBACK = "127.0.0.1"


class Metrics:
    """Every metric of a run, each labelled with the run's name. A sink: a record sets what it knows."""

    def __init__(self, run: str) -> None:
        self.registry = CollectorRegistry()
        self._run = run
        self._step = self._gauge("step", "Steps finished")
        self._last_step = self._gauge("last_step_timestamp_seconds", "When the last step finished, since the epoch")
        self._step_seconds = self._gauge("step_seconds", "Duration of the last step")
        self._phase_seconds = self._counter("phase_seconds", "Time spent in each phase", "phase")
        self._tokens = self._counter("trained_tokens", "Prompt and response tokens trained on")
        self._tokens_per_second = self._gauge("tokens_per_second", "Tokens of the last step over its duration")

        self._reward_mean = self._gauge("reward_mean", "Mean reward of the last step's rollouts")
        self._masked = self._counter("masked_rollouts", "Rollouts of trained groups that nobody could score")
        self._reward_std = self._gauge("reward_std", "Standard deviation of the last step's rewards")
        self._reward_min = self._gauge("reward_min", "Lowest reward of the last step")
        self._reward_max = self._gauge("reward_max", "Highest reward of the last step")
        self._score_mean = self._gauge("score_mean", "Mean of each component of the score", "component")
        self._zero_signal = self._gauge("zero_signal_group_ratio", "Share of groups from which nothing is learned")
        self._zero_signal_steps = self._counter("zero_signal_steps", "Steps in which no group has signal")
        self._single = self._gauge("single_rollout_groups", "Groups of one rollout in the last step")
        self._dropped = self._counter("dropped_groups", "Groups that the filter replaced by others", "cause")
        self._outliers = self._counter("reward_outliers", "Rewards beyond 6 robust deviations of their step")
        self._oldest = self._gauge("oldest_trained_version", "Oldest policy that chose a token of the last step")
        self._response_mean = self._gauge("response_tokens_mean", "Mean length of a response")
        self._response_max = self._gauge("response_tokens_max", "Longest response of the last step")
        self._truncated = self._gauge("response_truncated_ratio", "Share of responses cut at the length limit")

        self._loss = self._gauge("loss", "Loss of the last update")
        self._grad_norm = self._gauge("grad_norm", "Gradient norm before clipping")
        self._learning_rate = self._gauge("learning_rate", "Learning rate of the last update")
        self._entropy = self._gauge("entropy", "Mean entropy of the policy over loss tokens, in nats")
        self._clip_fraction = self._gauge("clip_fraction", "Share of loss tokens whose ratio was clipped")
        self._approx_kl = self._gauge("approx_kl", "KL between the policy before and after the update, in nats")
        self._mismatch_mean = self._gauge("mismatch_mean", "Mean |p_train - p_rollout| over loss tokens")
        self._mismatch_max = self._gauge("mismatch_max", "Largest |p_train - p_rollout| of the last step")
        self._mismatch_kl = self._gauge("mismatch_kl", "KL(rollout || train) by its plain estimate k1, in nats")
        self._mismatch_k3 = self._gauge("mismatch_k3", "KL(rollout || train) by its estimate k3, in nats")
        self._mismatch_chi2 = self._gauge("mismatch_chi2", "Mean squared p_train / p_rollout, minus 1")
        self._effective = self._gauge(
            "effective_sample_ratio", "Share of loss tokens left after weighing by that ratio"
        )
        self._rejected = self._gauge("rejected_fraction", "Share of loss tokens that the rollout correction took out")
        self._reference_kl = self._gauge("reference_kl", "KL(policy || reference) over loss tokens, in nats")
        self._kl_coef = self._gauge("kl_coef", "What the distance from the reference costs")
        self._skipped = self._counter("skipped_updates", "Updates whose loss or gradient was not finite")

        self._value_loss = self._gauge("value_loss", "Loss of the critic's last updates")
        self._critic_grad_norm = self._gauge("critic_grad_norm", "Gradient norm of the critic before clipping")
        self._critic_learning_rate = self._gauge("critic_learning_rate", "Learning rate of the critic's last update")
        self._value_clip_fraction = self._gauge("value_clip_fraction", "Share of values whose change was clipped")
        self._value_mean = self._gauge("value_mean", "Mean value of the last step's tokens before its updates")
        self._return_mean = self._gauge("return_mean", "Mean return of the last step's tokens")
        self._explained_variance = self._gauge(
            "explained_variance", "Share of the returns' variance that the critic foresaw"
        )

        self._actor_version = self._gauge("actor_weight_version", "Version the trainer holds")
        self._rollout_version = self._gauge("rollout_weight_version", "Version committed on every engine")
        self._publish_seconds = self._gauge("publish_seconds", "Duration of the last publish")
        self._publish_bytes = self._gauge("publish_bytes", "Bytes moved by the last publish")
        self._engines = self._gauge("engines", "Engines that took the last publish")

        self._eval = self._gauge("eval", "Numbers of the last evaluation: accuracy, score, pass@4, ...", "number")
        self._eval_source = self._gauge("eval_by_source", "The same, per data source", "number", "source")
        self._eval_step = self._gauge("eval_step", "Step after which the last evaluation ran")

        self._save_step = self._gauge("checkpoint_step", "Step of the newest complete checkpoint")
        self._save_blocking = self._gauge("checkpoint_blocking_seconds", "How long training stood still for the last")
        self._save_seconds = self._gauge("checkpoint_seconds", "Duration of the whole save, most of it behind training")
        self._save_bytes = self._gauge("checkpoint_bytes", "Size of the last checkpoint")
        self._save_failures = self._counter("checkpoint_failures", "Saves that failed")
        self._warnings = self._counter("warnings", "Warnings shown")

    def record(self, record: Record) -> None:
        match record.event:
            case StepFinished(summary=summary, phase_seconds=phase_seconds):
                self._set(self._last_step, record.time.timestamp())
                for phase, seconds in phase_seconds.items():
                    self._phase_seconds.labels(self._run, phase).inc(seconds)
                self._record_step(summary)
                if summary.update is not None:
                    self._record_update(summary.update)
                if summary.critic is not None:
                    self._record_critic(summary.critic)
                if summary.rollouts is not None:
                    self._record_rollouts(summary.rollouts)
            case Published(result=result):
                self._record_publish(result)
            case Evaluated(step=step, result=evaluation):
                self._set(self._eval_step, step)
                self._record_evaluation(evaluation)
            case CheckpointSaved() as saved:
                self._set(self._save_step, saved.step)
                self._set(self._save_blocking, saved.blocking_seconds)
                self._set(self._save_seconds, saved.seconds)
                self._set(self._save_bytes, saved.num_bytes)
            case CheckpointFailed():
                self._save_failures.labels(self._run).inc()
            case Warned():
                self._warnings.labels(self._run).inc()

    def close(self) -> None:
        """Nothing to close: the registry dies with the run, the endpoint has an owner of its own."""

    def _record_step(self, summary: StepSummary) -> None:
        self._set(self._step, summary.step)
        self._set(self._actor_version, summary.version)
        self._set(self._step_seconds, summary.seconds)
        self._tokens.labels(self._run).inc(summary.num_tokens)
        self._set(self._tokens_per_second, summary.tokens_per_second)
        self._skipped.labels(self._run).inc(summary.num_skipped_updates)
        if summary.kl_coef is not None:
            self._set(self._kl_coef, summary.kl_coef)

    def _record_update(self, update: UpdateStats) -> None:
        self._set(self._loss, update.loss)
        self._set(self._grad_norm, update.grad_norm)
        self._set(self._learning_rate, update.learning_rate)
        self._set(self._entropy, update.entropy)
        self._set(self._clip_fraction, update.clip_fraction)
        self._set(self._approx_kl, update.approx_kl)
        self._set(self._mismatch_mean, update.mismatch_mean)
        self._set(self._mismatch_max, update.mismatch_max)
        self._set(self._mismatch_kl, update.mismatch_kl)
        self._set(self._mismatch_k3, update.mismatch_k3)
        self._set(self._mismatch_chi2, update.mismatch_chi2)
        self._set(self._effective, update.effective_sample_ratio)
        self._set(self._rejected, update.rejected_fraction)
        if update.reference_kl is not None:
            self._set(self._reference_kl, update.reference_kl)

    def _record_critic(self, critic: CriticStats) -> None:
        self._set(self._value_loss, critic.loss)
        self._set(self._critic_grad_norm, critic.grad_norm)
        self._set(self._critic_learning_rate, critic.learning_rate)
        self._set(self._value_clip_fraction, critic.clip_fraction)
        self._set(self._value_mean, critic.value_mean)
        self._set(self._return_mean, critic.return_mean)
        self._set(self._explained_variance, critic.explained_variance)

    def _record_rollouts(self, rollouts: RolloutSummary) -> None:
        self._masked.labels(self._run).inc(rollouts.num_masked_rollouts)
        self._set(self._reward_mean, rollouts.reward_mean)
        self._set(self._reward_std, rollouts.reward_std)
        self._set(self._reward_min, rollouts.reward_min)
        self._set(self._reward_max, rollouts.reward_max)
        for component, mean in rollouts.component_means.items():
            self._set(self._score_mean, mean, component)
        self._set(self._zero_signal, rollouts.num_zero_signal_groups / rollouts.num_groups)
        self._zero_signal_steps.labels(self._run).inc(int(not rollouts.has_signal))
        self._set(self._single, rollouts.num_single_groups)
        for cause, number in rollouts.dropped_groups.items():
            self._dropped.labels(self._run, cause).inc(number)
        self._outliers.labels(self._run).inc(rollouts.num_reward_outliers)
        if rollouts.tokens_by_version:
            self._set(self._oldest, min(rollouts.tokens_by_version))
        self._set(self._response_mean, rollouts.response_tokens_mean)
        self._set(self._response_max, rollouts.response_tokens_max)
        self._set(self._truncated, rollouts.truncated_ratio)

    def _record_publish(self, result: PublishResult) -> None:
        self._set(self._rollout_version, result.version)
        self._set(self._publish_seconds, result.seconds)
        self._set(self._publish_bytes, result.num_bytes)
        self._set(self._engines, result.num_engines)

    def _record_evaluation(self, result: EvalResult) -> None:
        for name, value in result.numbers.items():
            self._set(self._eval, value, name)
        for source in result.main.by_source:
            for name, value in result.numbers_of(source).items():
                self._set(self._eval_source, value, name, source)

    def _set(self, gauge: Gauge, value: float, *labels: str) -> None:
        # A labelled gauge is not exposed before its first value: what a run does not know, it does not show as 0.
        gauge.labels(self._run, *labels).set(value)

    def _gauge(self, name: str, help_text: str, *labels: str) -> Gauge:
        return Gauge(f"megarl_{name}", help_text, ("run", *labels), registry=self.registry)

    def _counter(self, name: str, help_text: str, *labels: str) -> Counter:
        return Counter(f"megarl_{name}", help_text, ("run", *labels), registry=self.registry)


class MetricsEndpoint:
    """`http://127.0.0.1:<port>/metrics` for one registry, from construction to `close`."""

    def __init__(self, registry: CollectorRegistry, *, port: int) -> None:
        self._server, self._thread = _listen(registry, port)

    @property
    def url(self) -> str:
        return f"http://{LOOPBACK}:{self._server.server_port}/metrics"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(timeout=5)


def _listen(registry: CollectorRegistry, port: int) -> tuple[WSGIServer, Thread]:
    try:
        return start_http_server(port, addr=LOOPBACK, registry=registry)
    except OSError as error:
        raise MachineError(
            f"observe.metrics_port: cannot listen on {LOOPBACK}:{port}: {error.strerror}; "
            "choose another port, 0 for any free one, or null for none"
        ) from error
