"""Training: from a config and a folder to a trained model, resumable at every checkpoint."""

import contextlib
import math
import time
from pathlib import Path

import jax
import jax.numpy as jnp
from rich.console import Console

from ldm_jax.config import AttentionImplementation, Config
from ldm_jax.config_file import config_to_toml
from ldm_jax.data import ByteTokenizer, Data, load_data
from ldm_jax.errors import UserError
from ldm_jax.files import write_atomically
from ldm_jax.infer import generate, make_evaluate
from ldm_jax.mixers import Form, MixerKind
from ldm_jax.nn import count_parameters, model_graph
from ldm_jax.train.checkpoints import Checkpoints, Progress
from ldm_jax.train.metrics import MetricsFile
from ldm_jax.train.progress import ProgressLine
from ldm_jax.train.run_directory import RunDirectory
from ldm_jax.train.step import StepMetrics, TrainState, make_state, make_train_step


def train(config: Config, path: Path, console: Console | None = None) -> TrainState:
    """Trains until `train.steps` and returns the final state; `path` then holds config, metrics, checkpoints, sample.

    A run that `path` holds already goes on from its last checkpoint, to the same bits as if it had not stopped.

    Raises:
        UserError: the corpus or the folder does not serve, the disk is full, or a loss is not finite.
    """
    console = console or Console()
    if config.model.attention is AttentionImplementation.CUDNN and jax.default_backend() != "gpu":
        raise UserError(
            f"model.attention is cudnn, but JAX runs on {jax.default_backend()} here: cuDNN needs an NVIDIA GPU. Set "
            "model.attention to xla."
        )
    mixer = config.mixer
    if mixer.kind is MixerKind.LDM and mixer.ldm.form is Form.FUSED and jax.default_backend() != "tpu":
        raise UserError(
            f"mixer.ldm.form is fused, but JAX runs on {jax.default_backend()} here: its kernel is for TPUs. Set "
            "mixer.ldm.form to recurrent, which has the same numbers and parameters."
        )
    if config.data.separate_documents:
        raise UserError("data.separate_documents is true, but the model cannot do that yet: set it to false.")
    data = load_data(config.data, config.model.vocabulary)
    directory = RunDirectory(path)
    changes = directory.open(config)
    with contextlib.closing(directory):
        if not directory.config_file.exists():
            directory.store(config)  # before the folder holds anything else, so that it is known for a run
        checkpoints = Checkpoints(directory.checkpoints, config.train.keep_checkpoints)
        with contextlib.closing(checkpoints):
            state, progress = make_state(config), Progress(0.0, data.fingerprint)
            if (latest := checkpoints.latest_step()) is not None:
                state, progress = checkpoints.restore(latest, state)
            _introduce(console, config, path, data, state, progress, changes)
            if state.step < config.train.steps:
                directory.store(config)
                run = _Run(config, directory, checkpoints, data, console, int(state.step), progress.seconds)
                with contextlib.closing(run.metrics):
                    state = run.go(state)
        if isinstance(data.tokenizer, ByteTokenizer):
            _sample(config, directory, state, console)
    return state


class _Run:
    """The loop. Metrics are read one step late, so that the device never waits for the host."""

    def __init__(
        self,
        config: Config,
        directory: RunDirectory,
        checkpoints: Checkpoints,
        data: Data,
        console: Console,
        first: int,
        seconds: float,
    ):
        self.config, self.checkpoints, self.data, self.first = config, checkpoints, data, first
        self.metrics = MetricsFile(directory.metrics_file, first, config.train.checkpoint_every)
        self.line = ProgressLine(console, config.train.steps)
        self.tokens_per_step = config.train.batch_size * config.data.context
        at_a_time = config.train.batch_size // config.train.accumulation
        self.evaluate = make_evaluate(model_graph(config.model, config.mixer), at_a_time)
        self.validation = data.validation_windows(config.train.validation_windows).tokens
        self.started = time.monotonic() - seconds
        self.last_log = first, time.monotonic()

    def go(self, state: TrainState) -> TrainState:
        config = self.config.train
        train_step = make_train_step(self.config)
        batches = self.data.batches(self.first * config.batch_size, config.batch_size, config.seed)
        unread: tuple[int, StepMetrics] | None = None
        with self.line:
            for step in range(self.first + 1, config.steps + 1):
                state, metrics = train_step(state, jnp.asarray(next(batches).tokens))
                if unread is not None:
                    self._report(*unread)
                unread = step, metrics
                validate = step % config.validate_every == 0 or step == config.steps
                save = step % config.checkpoint_every == 0 or step == config.steps
                if validate or save:
                    self._report(*unread)
                    unread = None
                if validate:
                    self._validate(step, state)
                elif save:
                    self._check_params(step, state)
                if save:
                    self.checkpoints.save(step, state, Progress(time.monotonic() - self.started, self.data.fingerprint))
                if validate or save:
                    self.last_log = step, time.monotonic()  # their time is not the steps'
        return state

    def _report(self, step: int, metrics: StepMetrics) -> None:
        """Checks the step and, where it is due, logs it."""
        loss, grad_norm, rate = (float(metric) for metric in metrics)
        if not (math.isfinite(loss) and math.isfinite(grad_norm)):
            self._stop(f"step {step}: the loss is {loss} and the gradient's norm {grad_norm}")
        now = time.monotonic()
        since, then = self.last_log
        if step % self.config.train.log_every and step < self.config.train.steps:
            if step == self.first + 1:
                self.last_log = step, now  # from here on nothing is compiled
            return
        seconds_per_step = (now - then) / max(step - since, 1)
        row = {
            "step": step,
            "loss": loss,
            "grad_norm": grad_norm,
            "learning_rate": rate,
            "tokens": step * self.tokens_per_step,
            "tokens_per_second": self.tokens_per_step / seconds_per_step,
            "seconds": now - self.started,
        }
        self.metrics.write(row)
        self.line.show(row, seconds_per_step)
        self.last_log = step, now

    def _stop(self, why: str) -> None:
        kept = self.checkpoints.latest_step()
        raise UserError(
            f"{why}, so the run stops. "
            + (f"The checkpoint of step {kept} is kept." if kept is not None else "There is no checkpoint yet.")
            + " Lower train.learning_rate or train.clip_norm and start again."
        )

    def _check_params(self, step: int, state: TrainState) -> None:
        """A finite loss can be followed by a ruinous update: what is saved has to give a finite loss itself."""
        loss = self.evaluate(state.params, self.validation[: self.config.train.batch_size]).loss
        if not math.isfinite(loss):
            self._stop(f"step {step}: the update has made the loss {loss}")

    def _validate(self, step: int, state: TrainState) -> None:
        result = self.evaluate(state.params, self.validation)
        if not math.isfinite(result.loss):
            self._stop(f"step {step}: the update has made the validation loss {result.loss}")
        bits = result.bits_per_byte / self.data.bytes_per_token  # the evaluation's bits are of a token
        self.metrics.write({"step": step, "validation_loss": result.loss, "validation_bits_per_byte": bits})
        self.line.note(f"step {step}: validation loss {result.loss:.4f} nats a token, {bits:.4f} bits a byte")


def _introduce(
    console: Console,
    config: Config,
    path: Path,
    data: Data,
    state: TrainState,
    progress: Progress,
    changes: list[str],
) -> None:
    """What is trained, on what, from where."""

    def say(line: str) -> None:
        console.print(line, highlight=False, soft_wrap=True, markup=False)

    say(config_to_toml(config).strip())
    device = jax.devices()[0]
    parts = count_parameters(state.params)
    tokens = config.train.steps * config.train.batch_size * config.data.context
    say(f"\ndevice      {jax.device_count()} x {device.platform} ({device.device_kind}), jax {jax.__version__}")
    say(f"parameters  {sum(parts.values()):,} = " + " + ".join(f"{count:,} {part}" for part, count in parts.items()))
    say(f"corpus      {data.describe()}")
    say(f"training    {config.train.steps:,} steps, {tokens:,} tokens to see")
    for change in changes:
        say(f"changed     {change}")
    if progress.corpus != data.fingerprint:
        say("changed     the corpus is not the one that the run was started on: the data goes on with the new one")
    done = int(state.step)
    if done >= config.train.steps:
        say(f"run         {path} is finished at step {done}; a higher train.steps continues it")
    else:
        say(f"run         {path}, " + (f"goes on from step {done}" if done else "new"))


def _sample(config: Config, directory: RunDirectory, state: TrainState, console: Console) -> None:
    """Writes and prints what the model makes of the prompt."""
    graph, prompt = model_graph(config.model, config.mixer), config.train.sample_prompt.encode()
    text = prompt + generate(graph, state.params, prompt, config.train.sample_tokens, config.data.context)
    try:
        write_atomically(directory.sample_file, text.decode(errors="replace"))
    except OSError as error:
        raise UserError(f"{directory.sample_file} cannot be written: {error.strerror}.") from error
    console.print(text.decode(errors="replace"), highlight=False, soft_wrap=True, markup=False)
