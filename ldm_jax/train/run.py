"""Training: from a config and a folder to a trained model, resumable at every checkpoint."""

import contextlib
import importlib.metadata
import tempfile
import time
from pathlib import Path

import jax
import tomli_w
from jax.sharding import Mesh
from rich.console import Console

from ldm_jax.config import AttentionImplementation, Config
from ldm_jax.config.toml import config_to_toml, options_by_name, options_in_use
from ldm_jax.data import Data, Tokenizer, load_data
from ldm_jax.errors import UserError
from ldm_jax.files import write_atomically
from ldm_jax.infer import Sampling, complete
from ldm_jax.mixers import Form, MixerKind
from ldm_jax.nn import count_parameters, model_graph
from ldm_jax.parallel import code_fingerprint, first_failure, leader_does, leads, make_mesh, require_same
from ldm_jax.train.checkpoints import Checkpoints, Progress
from ldm_jax.train.loop import Loop
from ldm_jax.train.run_directory import RunDirectory, checkpoints_folder
from ldm_jax.train.step import TrainState, make_state
from ldm_jax.train.stop_signal import StopSignal

SAME_PACKAGES = "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "numpy"
"""On all hosts, in the same versions."""
SHARED_STORAGE_SECONDS = 30.0
"""Until a file that one host has written is seen by another."""


def train(config: Config, path: Path, console: Console | None = None) -> TrainState:
    """Trains until `train.steps` and returns the final state; `path` then holds config, metrics, checkpoints, sample.

    A run that `path` holds already goes on from its last whole checkpoint, to the same bits as if it had not stopped.
    At SIGTERM or SIGINT it saves and returns early.

    In a job of several processes, which `jax.distributed` has set up, all call this with the same config and a folder
    on storage that they share (or have `train.checkpoints` on such). The first one writes and prints; a signal to any
    of them stops all at the same step.

    Raises:
        UserError: the corpus or the folder does not serve, too many updates in a row were skipped, the last checkpoint
            could not be written, or the processes are not the same.
    """
    console = console or Console()
    console.quiet = console.quiet or not leads()
    require_same({"code": code_fingerprint(), "installed packages": _packages()})  # which say what options there are
    require_same({name: repr(value) for name, value in options_by_name(config).items()})
    _check_device(config)
    mesh = make_mesh(config) if jax.device_count() > 1 else None
    on_mesh = contextlib.nullcontext() if mesh is None else jax.set_mesh(mesh)
    with on_mesh, StopSignal() as stop, contextlib.closing(RunDirectory(path)) as directory:
        data = load_data(config.data, config.model.vocabulary)
        require_same({"corpus": data.fingerprint, "tokenizer": data.tokenizer.fingerprint})
        changes = _open(directory, config)
        keep = config.train.keep_checkpoints, config.train.keep_every
        with contextlib.closing(Checkpoints(checkpoints_folder(config, path), *keep)) as checkpoints:
            checkpoints.remove_leftovers()
            state, warnings = make_state(config, mesh), []
            progress = Progress(0, 0.0, data.fingerprint, config_to_toml(config), _tokenizer_files(data.tokenizer))
            if (restored := checkpoints.restore_latest(state)) is not None:
                state, restored_progress, warnings = restored
                if restored_progress.tokenizer != progress.tokenizer:
                    raise UserError(
                        f"the run in {path} was trained with another tokenizer than that of the data: restore the "
                        "corpus, or give another --run."
                    )
                progress = restored_progress
                checkpoints.put_aside(later_than=int(state.step))
            notes = [f"changed     {change}" for change in changes] + [f"warning     {warning}" for warning in warnings]
            _introduce(console, config, path, data, mesh, state, progress, notes)
            if int(state.step) < config.train.steps:
                leader_does(lambda: directory.store(config))
                progress = progress._replace(config=config_to_toml(config), corpus=data.fingerprint)
                loop = Loop(config, directory, checkpoints, data, console, progress, stop, mesh)
                with contextlib.closing(loop):
                    state = loop.run(state)
        if int(state.step) < config.train.steps:
            _say(console, f"stopped by {stop.name} at step {state.step}: the same command goes on from there")
        else:
            _sample(config, directory, data.tokenizer, state, console)
    return state


def _open(directory: RunDirectory, config: Config) -> list[str]:
    """Opens the folder, and returns what has changed. One process does, and the others look whether they see it."""
    changes: list[str] = []

    def open_and_mark() -> None:
        changes.extend(directory.open(config))
        if not directory.config_file.exists():
            directory.store(config)  # before the folder holds anything else, so that it is known for a run

    leader_does(open_and_mark)
    if config.train.checkpoints is not None:
        return changes  # the others need nothing of the folder
    seen = directory.config_file.exists()
    end = time.monotonic() + SHARED_STORAGE_SECONDS
    while not seen and time.monotonic() < end:
        time.sleep(0.5)
        seen = directory.config_file.exists()
    unseen = None if seen else f"process {jax.process_index()} does not see the run of process 0 in {directory.path}"
    if (failure := first_failure(unseen)) is not None:
        raise UserError(
            f"{failure}: give all the same --run, on storage that all hosts share, or have train.checkpoints on such."
        )
    return changes


def _packages() -> str:
    return " ".join(f"{name} {importlib.metadata.version(name)}" for name in SAME_PACKAGES)


def _check_device(config: Config) -> None:
    here = jax.default_backend()
    if config.model.attention is AttentionImplementation.CUDNN and here != "gpu":
        raise UserError(
            f"model.attention is cudnn, but JAX runs on {here} here: cuDNN needs an NVIDIA GPU. Set model.attention to "
            "xla."
        )
    mixer = config.mixer
    if mixer.kind is MixerKind.LDM and mixer.ldm.form is Form.FUSED and here != "tpu":
        raise UserError(
            f"mixer.ldm.form is fused, but JAX runs on {here} here: its kernel is for TPUs. Set mixer.ldm.form to "
            "recurrent, which has the same numbers and parameters."
        )


def _tokenizer_files(tokenizer: Tokenizer) -> dict[str, str]:
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save(Path(folder))
        return {file.name: file.read_bytes().decode() for file in sorted(Path(folder).iterdir())}


def _say(console: Console, line: str) -> None:
    console.print(line, highlight=False, soft_wrap=True, markup=False)


def _introduce(
    console: Console,
    config: Config,
    path: Path,
    data: Data,
    mesh: Mesh | None,
    state: TrainState,
    progress: Progress,
    notes: list[str],
) -> None:
    """What is trained, on what, from where."""
    parts = count_parameters(state.params)
    tokens = config.train.steps * config.train.batch_size * config.data.context
    count = " + ".join(f"{count:,} {part}" for part, count in parts.items())
    lines = [
        tomli_w.dumps(options_in_use(config)).strip(),
        f"\ndevice      {_devices(mesh)}, jax {jax.__version__}",
        f"parameters  {sum(parts.values()):,} = {count}",
        f"corpus      {data.describe()}",
        f"training    {config.train.steps:,} steps, {tokens:,} tokens to see",
        *notes,
    ]
    if progress.corpus != data.fingerprint:
        lines.append(
            "changed     the corpus is not the one that the run was started on: the data goes on with the new one"
        )
    done = int(state.step)
    if done >= config.train.steps:
        lines.append(f"run         {path} is finished at step {done}; a higher train.steps continues it")
    else:
        lines.append(f"run         {path}, " + (f"goes on from step {done}" if done else "new"))
    for line in lines:
        _say(console, line)


def _devices(mesh: Mesh | None) -> str:
    """What the work is done by, and how it is shared."""
    device, there, hosts = jax.devices()[0], jax.device_count(), jax.process_count()
    used = 1 if mesh is None else mesh.size
    text = f"{used} x {device.platform} ({device.device_kind})" + (f" over {hosts} processes" if hosts > 1 else "")
    if mesh is not None and used > 1:
        text += ", " + " x ".join(f"{name} {size}" for name, size in mesh.shape.items() if size > 1)
    if used < there:
        text += f"; {there - used} of {there} are idle, as train.batch_size and [mesh] divide the work"
    return text


def _sample(config: Config, directory: RunDirectory, tokenizer: Tokenizer, state: TrainState, console: Console) -> None:
    """Writes and prints what the model makes of the prompt."""
    graph, prompt = model_graph(config.model, config.mixer), config.train.sample_prompt
    pieces = complete(
        graph, state.trained, tokenizer, [prompt], config.data.context, config.train.sample_tokens, sampling=Sampling()
    )
    text = prompt + b"".join(piece for (piece,) in pieces).decode(errors="replace")
    leader_does(lambda: _store_sample(directory.sample_file, text))
    _say(console, text)


def _store_sample(file: Path, text: str) -> None:
    try:
        write_atomically(file, text)
    except OSError as error:
        raise UserError(f"{file} cannot be written: {error.strerror}.") from error
