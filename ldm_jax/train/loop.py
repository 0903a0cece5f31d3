"""The loop over steps, with what is logged, validated and saved between them."""

import math
import time
from typing import NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh
from rich.console import Console

from ldm_jax.config import Config
from ldm_jax.data import Data
from ldm_jax.errors import UserError
from ldm_jax.infer import make_evaluate, make_memory_figures
from ldm_jax.mixers import MixerKind
from ldm_jax.nn import model_graph
from ldm_jax.parallel import StopVote, leads
from ldm_jax.train.checkpoints import Checkpoints, Progress
from ldm_jax.train.feed import feed
from ldm_jax.train.metrics import Row
from ldm_jax.train.progress import ProgressLine
from ldm_jax.train.records import Records
from ldm_jax.train.run_directory import RunDirectory
from ldm_jax.train.step import StepMetrics, TrainState, make_train_step
from ldm_jax.train.stop_signal import StopSignal
from ldm_jax.train.utilisation import device_memory_bytes, model_flops_per_token, peak_flops

FIGURE_TOKENS = 512
"""Of the first validation window, that a depth memory's figures are averaged over."""


class Unread(NamedTuple):
    """A step whose metrics are still on the device."""

    step: int
    windows: int
    """Consumed with it."""
    metrics: StepMetrics


class Loop:
    """The loop. Metrics are read one step late, so that an accelerator never waits for the host."""

    def __init__(
        self,
        config: Config,
        directory: RunDirectory,
        checkpoints: Checkpoints,
        data: Data,
        console: Console,
        progress: Progress,
        stop: StopSignal,
        mesh: Mesh | None,
    ):
        self.config, self.directory, self.checkpoints, self.data = config, directory, checkpoints, data
        self.progress, self.stop, self.mesh = progress, stop, mesh
        self.line = ProgressLine(console, config.train.steps)
        at_a_time = config.train.batch_size // config.train.accumulation
        self.evaluate = make_evaluate(model_graph(config.model, config.mixer), at_a_time, data.bytes_per_token)
        self.validation = data.validation_windows(config.train.validation_windows)
        self.figures = make_memory_figures(config) if config.mixer.kind is MixerKind.LDM else None
        self.flops_per_token = model_flops_per_token(config)
        self.peak_flops = peak_flops(1 if mesh is None else mesh.size)
        self.started = time.monotonic() - progress.seconds
        self.last_log = 0, time.monotonic()
        self.records: Records | None = None
        self.profiling = False
        self.reads_late = jax.default_backend() != "cpu"  # there a time would include the next step
        self.compiled: tuple[int, float] | None = None
        self.vote = StopVote(mesh) if mesh is not None and jax.process_count() > 1 else None

    def run(self, state: TrainState) -> TrainState:
        """Trains until `train.steps`, or until the stop signal. The state that it returns has been saved."""
        config, log = self.config.train, self.config.log
        self.first = step = int(state.step)
        self._open()
        train_step = make_train_step(self.config, self.mesh)
        batches = feed(self.data, self.progress.windows, config.batch_size, config.seed, self.mesh)
        saved, unread, unsaved = step, None, None
        with self.line:
            while step < config.steps and not self._stopped():
                step += 1
                self._profile(step, state)
                state, metrics = train_step(state, next(batches))
                self.progress = self.progress._replace(windows=self.progress.windows + config.batch_size)
                if unread is not None:
                    self._report(unread)
                unread = Unread(step, self.progress.windows, metrics)
                if not self.reads_late:
                    self._report(unread)
                    unread = None
                validate = step % config.validate_every == 0 or step == config.steps
                save = step % config.checkpoint_every == 0 or step == config.steps
                figures = self.figures is not None and step % log.memory_every == 0
                if not (validate or save or figures):
                    continue
                if unread is not None:
                    self._report(unread)
                    unread = None
                if figures:
                    self._log_figures(step, state)
                if validate:
                    self._validate(step, state)
                if save:
                    unsaved, saved = self._save(step, state, checked=validate), step
                self.last_log = step, time.monotonic()  # their time is not the steps'
            if unread is not None:
                self._report(unread)
            if saved < step:
                unsaved = self._save(step, state, checked=False)
        if (failure := self.checkpoints.wait() or unsaved) is not None:
            raise UserError(f"{failure} Free some space and start again with the same command.")
        return state

    def _open(self) -> None:
        self.records = Records(self.config, self.directory, self.first)
        if self.records.warning is not None:
            self.line.note(f"warning: {self.records.warning}")
        self.last_log = self.first, time.monotonic()

    def _stopped(self) -> bool:
        """Of several processes, all at the same step."""
        number = self.stop.number if self.vote is None else self.vote.cast(self.stop.number)
        if number:  # else a signal that came while the vote was cast would be forgotten
            self.stop.number = number
        return number != 0

    def close(self) -> None:
        """Closes the files of metrics."""
        if self.profiling:
            jax.profiler.stop_trace()
        if self.records is not None:
            self.records.close()

    def _report(self, unread: Unread) -> None:
        """Tells of a skipped update, and logs the step where it is due."""
        step, windows, metrics = jax.device_get(unread)
        if metrics.skipped:
            self._report_skip(step, metrics)
        now = time.monotonic()
        since, then = self.last_log
        if self.compiled is None:
            self.compiled = self.last_log = step, now  # from here on nothing is compiled
        if step % self.config.log.every and step < self.config.train.steps:
            return
        speed = {}
        if step > self.compiled[0]:
            tokens_per_second = (step - since) * self.config.train.batch_size * self.config.data.context / (now - then)
            speed = {"tokens_per_second": tokens_per_second, **self._utilisation(tokens_per_second)}
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
        # Of all that is done between steps, too.
        per_step = (now - self.compiled[1]) / (step - self.compiled[0]) if speed else None
        self.line.show(row, per_step)
        self.last_log = step, now

    def _utilisation(self, tokens_per_second: float) -> dict[str, float]:
        flops = tokens_per_second * self.flops_per_token
        peak, memory = self.peak_flops, device_memory_bytes()
        found = {"model_flops_per_second": flops}
        if peak is not None:
            found["model_flops_utilisation"] = flops / peak
        if memory is not None:
            found["device_memory_bytes"] = memory
        return found

    def _report_skip(self, step: int, metrics: StepMetrics) -> None:
        in_a_row, total = int(metrics.skips.in_a_row), int(metrics.skips.total)
        why = f"loss {float(metrics.loss):.4g}, gradient {float(metrics.grad_norm):.4g}"
        self.line.note(f"step {step}: update skipped ({why}); {in_a_row} in a row, {total} in all")
        if in_a_row >= self.config.train.skips_in_a_row:
            self._give_up(f"step {step}: the last {in_a_row} updates were skipped ({why})")

    def _give_up(self, why: str) -> None:
        self.checkpoints.wait()
        kept = self.checkpoints.latest_step()
        raise UserError(
            f"{why}, so the run stops. "
            + (f"The checkpoint of step {kept} is kept." if kept is not None else "There is no checkpoint yet.")
            + " Lower optimizer.learning_rate or optimizer.clip_norm and start again."
        )

    def _validate(self, step: int, state: TrainState) -> None:
        result = self.evaluate(state.trained, self.validation)
        if not math.isfinite(result.loss):
            self._give_up(f"step {step}: the update has made the validation loss {result.loss}")
        bits = result.bits_per_byte
        tokens = self.progress.windows * self.config.data.context
        row = {"step": step, "tokens": tokens, "validation_loss": result.loss, "validation_bits_per_byte": bits}
        self._log(row)
        self.line.note(f"step {step}: validation loss {result.loss:.4f} nats a token, {bits:.4f} bits a byte")

    def _log_figures(self, step: int, state: TrainState) -> None:
        assert self.figures is not None
        window = jax.tree.map(lambda x: x[:1, :FIGURE_TOKENS], self.validation.windows)
        figures = self.figures(state.trained, window)
        finite = {name: each for name, each in figures._asdict().items() if np.isfinite(each).all()}
        self._log({"step": step, **{name: np.round(each, 5).tolist() for name, each in finite.items()}})

    def _save(self, step: int, state: TrainState, checked: bool) -> str | None:
        """Starts to write a checkpoint, once that before it is written. Returns why it could not, if so."""
        if not checked or state.average is not None:
            # A finite loss can be followed by a ruinous update: what is saved has to give a finite loss itself.
            few = jax.tree.map(lambda x: x[: self.config.train.batch_size], self.validation)
            loss = self.evaluate(state.params, few).loss
            if not math.isfinite(loss):
                self._give_up(f"step {step}: the update has made the loss {loss}")
        self.progress = self.progress._replace(seconds=time.monotonic() - self.started)
        self._warn(self.checkpoints.wait())
        failure = self.checkpoints.save(step, state, self.progress)
        if step < self.config.train.steps:
            self._warn(failure)
        return failure

    def _log(self, row: Row) -> None:
        assert self.records is not None
        for failure in self.records.write(row):
            self._warn(failure)

    def _warn(self, failure: str | None) -> None:
        if failure is not None:
            self.line.note(f"warning: {failure} Training goes on.")

    def _profile(self, step: int, state: TrainState) -> None:
        """Starts and ends the trace that `[log]` asks for."""
        first = self.config.log.profile_from
        if first is None or not leads():
            return
        if step == first:
            jax.profiler.start_trace(str(self.directory.path / "profile"))
            self.profiling = True
        elif self.profiling and step == first + self.config.log.profile_steps:
            jax.block_until_ready(state)
            jax.profiler.stop_trace()
            self.profiling = False
