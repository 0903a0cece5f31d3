"""The training loop: steps, and between them metrics, validation and checkpoints."""

import datetime
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh
from rich.console import Console

from ldm_jax.config import Config
from ldm_jax.data import Batch, Data
from ldm_jax.errors import DivergedError, UserError
from ldm_jax.infer import make_evaluate, make_memory_figures
from ldm_jax.mixers import DepthMemoryConfig
from ldm_jax.nn import model_graph
from ldm_jax.parallel import LocalRows, StopVote, is_leader
from ldm_jax.progress import TrainingLine
from ldm_jax.runs.checkpoints import Checkpoints, Progress
from ldm_jax.runs.state import TrainState
from ldm_jax.sharding import batch_sharding
from ldm_jax.train.metrics import Row
from ldm_jax.train.sinks import MetricsLogger
from ldm_jax.train.step import StepMetrics, make_train_step
from ldm_jax.train.stop_signal import StopSignal
from ldm_jax.train.utilisation import device_memory_bytes, model_flops_per_token, peak_flops

ESTIMATE_STEPS = 20
"""Steps after the first one from whose time the end of a run is estimated."""
FIGURE_TOKENS = 512
"""Tokens of the first validation window over which the statistics of a depth memory are averaged."""


def device_batches(data: Data, start: int, batch_size: int, seed: int, mesh: Mesh | None) -> Iterator[Batch]:
    """Endless batches on the devices; every process reads the rows that its own devices hold.

    Args:
        data: windows of the training text.
        start: windows that all processes have consumed so far.
        batch_size: windows of a batch over all processes.
        seed: seed of the order.
        mesh: mesh of all devices; None for one device.
    """
    sharding = None if mesh is None else batch_sharding(mesh)
    if sharding is None or jax.process_count() == 1:
        return (jax.device_put(batch, sharding) for batch in data.batches(start, batch_size, seed))
    local = LocalRows(sharding, batch_size)
    return (local.assemble(batch) for batch in data.batches(start, batch_size, seed, local.rows))


class StepResult(NamedTuple):
    """The metrics of a step, still on the device."""

    step: int
    windows: int
    """Windows consumed after the step."""
    metrics: StepMetrics


class Loop:
    """The training loop. An accelerator's metrics are read one step late, so that it never waits for the host."""

    def __init__(
        self,
        config: Config,
        path: Path,
        data: Data,
        checkpoints: Checkpoints,
        metrics: MetricsLogger,
        console: Console,
        progress: Progress,
        stop: StopSignal,
        mesh: Mesh | None,
    ):
        self.config, self.path, self.data, self.checkpoints, self.metrics = config, path, data, checkpoints, metrics
        self.progress, self.stop, self.mesh = progress, stop, mesh
        self.line = TrainingLine(console, config.train.steps)
        part_size = config.train.batch_size // config.train.accumulation
        units = data.bytes_per_token, data.tokenizer.end_of_document
        self.evaluate = make_evaluate(model_graph(config.model, config.mixer), part_size, *units)
        self.validation = data.validation_windows(config.train.validation_windows)
        self.figures = make_memory_figures(config) if isinstance(config.mixer.options, DepthMemoryConfig) else None
        self.flops_per_token = model_flops_per_token(config)
        self.peak_flops = peak_flops(1 if mesh is None else mesh.size)
        self.vote = StopVote(mesh).cast if mesh is not None and jax.process_count() > 1 else None
        self.reads_late = jax.default_backend() != "cpu"  # on a CPU the measured time would include the next step
        self.unreported: StepResult | None = None
        self.profiling = False
        self.started = time.monotonic() - progress.seconds
        self.last_log = 0, time.monotonic()
        self.compiled: tuple[int, float] | None = None
        self.estimated = False

    def run(self, state: TrainState) -> TrainState:
        """Trains until `train.steps` or a stop signal. Returns the state, which has been saved.

        Raises:
            DivergedError: loss or gradient are not finite, or too many updates in a row were skipped.
            UserError: the last checkpoint cannot be written.
        """
        config, log = self.config.train, self.config.log
        step = saved = int(state.step)
        train_step = make_train_step(self.config, self.mesh)
        batches = device_batches(self.data, self.progress.windows, config.batch_size, config.seed, self.mesh)
        failure = None
        self.last_log = step, time.monotonic()
        try:
            with self.line:
                self.line.note("compiling   the training step")
                while step < config.steps and not self.stop.requested(self.vote):
                    step += 1
                    self._profile(step, state)
                    state, metrics = train_step(state, next(batches))
                    self.progress = self.progress._replace(windows=self.progress.windows + config.batch_size)
                    self._report()
                    self.unreported = StepResult(step, self.progress.windows, metrics)
                    validate = step % config.validate_every == 0 or step == config.steps
                    save = step % config.checkpoint_every == 0 or step == config.steps
                    figures = self.figures is not None and step % log.memory_every == 0
                    interrupted = validate or save or figures
                    if interrupted or not self.reads_late:
                        self._report()
                    if figures:
                        self._log_figures(step, state)
                    if validate:
                        self._validate(step, state)
                    if save:
                        failure, saved = self._save(step, state, checked=validate), step
                    if interrupted:
                        self.last_log = step, time.monotonic()  # tokens_per_second counts steps only
                self._report()
                if saved < step:
                    failure = self._save(step, state, checked=False)
        finally:
            if self.profiling:
                jax.profiler.stop_trace()
        if (failure := self.checkpoints.wait() or failure) is not None:
            raise UserError(f"{failure} When it can be written, run the same command again.")
        return state

    def _report(self) -> None:
        """Logs the last step if it is due, and checks whether its update was skipped."""
        if self.unreported is None:
            return
        (step, windows, metrics), self.unreported = jax.device_get(self.unreported), None
        if metrics.skipped:
            self._report_skip(step, metrics)
        now = time.monotonic()
        last_step, last_time = self.last_log
        if self.compiled is None:
            self.line.note(f"compiled    in {now - last_time:.0f} s")
            self.compiled = self.last_log = step, now  # speed is measured from here on
        if step % self.config.log.every and step < self.config.train.steps:
            return
        speed = {}
        if step > self.compiled[0]:
            tokens = (step - last_step) * self.config.train.batch_size * self.config.data.context
            speed = self._speed(tokens / (now - last_time))
        row = {
            "step": step,
            "loss": float(metrics.loss),
            "grad_norm": float(metrics.grad_norm),
            **{f"grad_norm_{part}": float(norm) for part, norm in metrics.grad_norms.items()},
            "update_ratio": float(metrics.update_ratio),
            "learning_rate": float(metrics.learning_rate),
            "skipped_updates": int(metrics.skips.total),
            "tokens": windows * self.config.data.context,
            **speed,
            "seconds": now - self.started,
        }
        self._log({name: value for name, value in row.items() if math.isfinite(value)})
        # The mean time of a step for the time left includes validations and checkpoints.
        per_step = (now - self.compiled[1]) / (step - self.compiled[0]) if speed else None
        enough = step - self.compiled[0] >= ESTIMATE_STEPS and step < self.config.train.steps
        if per_step is not None and enough and not self.estimated:
            self.estimated = True
            left = datetime.timedelta(seconds=round((self.config.train.steps - step) * per_step))
            end = datetime.datetime.now().astimezone() + left
            self.line.note(f"estimate    the run ends in {left}, {end:on %Y-%m-%d at %H:%M}")
        self.line.show(row, per_step)
        self.last_log = step, now

    def _speed(self, tokens_per_second: float) -> dict[str, float]:
        flops = tokens_per_second * self.flops_per_token
        row = {"tokens_per_second": tokens_per_second, "model_flops_per_second": flops}
        if self.peak_flops is not None:
            row["model_flops_utilisation"] = flops / self.peak_flops
        if (memory := device_memory_bytes()) is not None:
            row["device_memory_bytes"] = memory
        return row

    def _report_skip(self, step: int, metrics: StepMetrics) -> None:
        in_a_row, total = int(metrics.skips.in_a_row), int(metrics.skips.total)
        why = f"loss {float(metrics.loss):.4g}, gradient norm {float(metrics.grad_norm):.4g}"
        self.line.note(f"step {step}: update skipped ({why}); {in_a_row} in a row, {total} in total")
        if in_a_row >= self.config.train.skips_in_a_row:
            self._give_up(f"step {step}: the last {in_a_row} updates were skipped ({why})")

    def _give_up(self, why: str) -> None:
        self.checkpoints.wait()
        latest = self.checkpoints.latest_step()
        raise DivergedError(
            f"{why}, so the run stops. "
            + (f"The checkpoint of step {latest} is kept." if latest is not None else "There is no checkpoint yet.")
            + " Lower optimizer.learning_rate or optimizer.clip_norm and start again."
        )

    def _validate(self, step: int, state: TrainState) -> None:
        result = self.evaluate(state.eval_params, self.validation)
        if not math.isfinite(result.loss):
            self._give_up(f"step {step}: the validation loss is {result.loss}")
        bits = result.bits_per_byte
        tokens = self.progress.windows * self.config.data.context
        row = {"step": step, "tokens": tokens, "validation_loss": result.loss, "validation_bits_per_byte": bits}
        self._log(row)
        self.line.note(f"step {step}: validation loss {result.loss:.4f} nats per token, {bits:.4f} bits per byte")

    def _log_figures(self, step: int, state: TrainState) -> None:
        assert self.figures is not None
        window = jax.tree.map(lambda x: x[:1, :FIGURE_TOKENS], self.validation.windows)
        figures = self.figures(state.eval_params, window)
        finite = {name: each for name, each in figures._asdict().items() if np.isfinite(each).all()}
        self._log({"step": step, **{name: np.round(each, 5).tolist() for name, each in finite.items()}})

    def _save(self, step: int, state: TrainState, checked: bool) -> str | None:
        """Starts to save a checkpoint, after the one before is complete. Returns why it cannot be saved, or None."""
        if not checked or state.average is not None:
            # A step with a finite loss can still ruin the parameters: only those with a finite loss are saved.
            few = jax.tree.map(lambda x: x[: self.config.train.batch_size], self.validation)
            loss = self.evaluate(state.params, few).loss
            if not math.isfinite(loss):
                self._give_up(f"step {step}: the loss after the update is {loss}")
        self.progress = self.progress._replace(seconds=time.monotonic() - self.started)
        self._warn(self.checkpoints.wait())
        failure = self.checkpoints.save(step, state, self.progress)
        if step < self.config.train.steps:
            self._warn(failure)
        return failure

    def _log(self, row: Row) -> None:
        for failure in self.metrics.write(row):
            self._warn(failure)

    def _warn(self, failure: str | None) -> None:
        if failure is not None:
            self.line.note(f"warning: {failure} Training continues.")

    def _profile(self, step: int, state: TrainState) -> None:
        """Starts and stops the trace that `log.profile_from` selects."""
        first = self.config.log.profile_from
        if first is None or not is_leader():
            return
        if step == first:
            jax.profiler.start_trace(str(self.path / "profile"))
            self.profiling = True
        elif self.profiling and step == first + self.config.log.profile_steps:
            jax.block_until_ready(state)
            jax.profiler.stop_trace()
            self.profiling = False
