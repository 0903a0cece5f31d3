"""A training run: everything before, around and after the loop."""

import contextlib
import importlib.metadata
import time
from pathlib import Path

import jax
from jax.sharding import Mesh
from rich.console import Console

from ldm_jax.config import Config
from ldm_jax.config.toml import config_to_toml, options_by_name, parse_config, unused_options
from ldm_jax.data import Data, Tokenizer, load_data, tokenizer_files
from ldm_jax.errors import UserError
from ldm_jax.files import save_text
from ldm_jax.infer import Sampling, complete
from ldm_jax.nn import count_parameters, model_graph
from ldm_jax.parallel import (
    code_fingerprint,
    first_failure,
    is_leader,
    make_mesh,
    mesh_sizes,
    on_leader,
    require_same,
)
from ldm_jax.runs.changes import with_init
from ldm_jax.runs.checkpoints import Checkpoints, Progress
from ldm_jax.runs.device import check_device
from ldm_jax.runs.run_directory import RunDirectory, checkpoint_directory
from ldm_jax.runs.state import TrainState
from ldm_jax.runs.storage import require_writable
from ldm_jax.train.loop import Loop
from ldm_jax.train.optimizer import effective_warmup
from ldm_jax.train.sinks import MetricsLogger
from ldm_jax.train.start import start
from ldm_jax.train.step import make_state
from ldm_jax.train.stop_signal import StopSignal

SAME_PACKAGES = "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "numpy"
"""Packages that need the same version on all hosts."""
SHARED_STORAGE_SECONDS = 30.0
"""How long a file that one host has written may take to be visible on the others."""


def train(config: Config, path: Path, console: Console | None = None) -> TrainState:
    """Trains until `train.steps`; the directory `path` then holds the config, metrics, checkpoints and a sample.

    A run that is already in `path` is resumed from its last intact checkpoint, and ends with the same bits as one that
    was never interrupted. A new run starts from the parameters of the run `train.init`, if that is set.
    SIGTERM and SIGINT save a checkpoint and end training early.

    With several processes, which `jax.distributed` connects, all call this function with the same config, and with the
    same `path` on shared storage (or with `train.checkpoints` on shared storage). Process 0 writes and prints. A signal
    to any process stops all of them after the same step.

    Returns:
        The final state.

    Raises:
        DivergedError: loss or gradient are not finite, or too many updates in a row were skipped.
        UserError: the corpus or the directory cannot be used, the last checkpoint cannot be written, or the processes
            differ.
    """
    console = console or Console()
    console.quiet = console.quiet or not is_leader()
    require_same({"code": code_fingerprint(), "installed packages": _packages()})  # before options, which depend on it
    require_same({name: repr(value) for name, value in options_by_name(config).items()})
    check_device(config)
    mesh_sizes(config, jax.device_count())  # [mesh] has to fit one device as well
    mesh = make_mesh(config) if jax.device_count() > 1 else None
    mesh_context = contextlib.nullcontext() if mesh is None else jax.set_mesh(mesh)
    with mesh_context, StopSignal() as stop, contextlib.closing(RunDirectory(path)) as directory:
        data = load_data(config.data, config.model.vocabulary)
        require_same({"corpus": data.fingerprint, "tokenizer": data.tokenizer.fingerprint})
        on_leader(directory.open)
        on_leader(lambda: directory.check_former_store(config))
        _check_shared(directory, config)
        keep = config.train.keep_checkpoints, config.train.keep_every
        require_writable(checkpoint_directory(config, path))
        with contextlib.closing(Checkpoints(checkpoint_directory(config, path), *keep)) as checkpoints:
            changes, warnings = [], [*data.warnings]
            on_leader(lambda: changes.extend(directory.claim(checkpoints, config, data.fingerprint)))
            checkpoints.remove_leftovers()
            progress = Progress(0, 0.0, data.fingerprint, config_to_toml(config), tokenizer_files(data.tokenizer))
            is_new = checkpoints.latest_step() is None
            state, lines = start(config, data, mesh) if is_new else (make_state(config, mesh), [])
            if (restored := checkpoints.restore_latest(state)) is not None:
                tokenizer = progress.tokenizer
                state, progress, skipped = restored
                if progress.tokenizer not in ({}, tokenizer):
                    raise UserError(
                        f"the run in {path} was trained with another tokenizer than that of the data: restore the "
                        "corpus, or give another --run."
                    )
                config = with_init(config, parse_config(progress.config, f"the config of step {state.step}"))
                checkpoints.rename_corrupt(later_than=int(state.step))
                warnings += skipped
            on_leader(lambda: warnings.extend(directory.restore_config(progress.config, is_new=restored is None)))
            notes = {"changed": changes, "unused": _unused(config), "warning": warnings}
            lines += [f"{kind:<12}{text}" for kind, texts in notes.items() for text in texts]
            _introduce(console, config, path, data, mesh, state, progress, lines)
            if int(state.step) < config.train.steps:
                progress = progress._replace(
                    config=config_to_toml(config), corpus=data.fingerprint, tokenizer=tokenizer_files(data.tokenizer)
                )
                on_leader(lambda: directory.store(progress.config))
                with contextlib.closing(MetricsLogger(config, path, int(state.step))) as metrics:
                    if metrics.warning is not None:
                        _print(console, f"warning     {metrics.warning}")
                    loop = Loop(config, path, data, checkpoints, metrics, console, progress, stop, mesh)
                    state = loop.run(state)
        if int(state.step) < config.train.steps:
            _print(console, f"stopped by {stop.name} after step {state.step}: run the same command again to resume")
        else:
            _sample(config, directory, data.tokenizer, state, console)
    return state


def _check_shared(directory: RunDirectory, config: Config) -> None:
    """Raises UserError unless all processes that use the directory see the one of process 0."""
    if config.train.checkpoints is not None:
        return  # the other processes do not use it
    end = time.monotonic() + SHARED_STORAGE_SECONDS
    while not (seen := directory.lock_file.exists()) and time.monotonic() < end:
        time.sleep(0.5)
    unseen = None if seen else f"process {jax.process_index()} does not see the run of process 0 in {directory.path}"
    if (failure := first_failure(unseen)) is not None:
        raise UserError(
            f"{failure}: give the same --run on storage that all hosts share, or set train.checkpoints to such storage."
        )


def _packages() -> str:
    return " ".join(f"{name} {importlib.metadata.version(name)}" for name in SAME_PACKAGES)


def _unused(config: Config) -> list[str]:
    """A phrase for each option that is set, but belongs to a mixer that is not used."""
    kind, defaults = config.mixer.kind, options_by_name(Config())
    return [
        f"{name} is {value}, but mixer.kind is {kind}"
        for name, value in unused_options(config).items()
        if value != defaults[name]
    ]


def _print(console: Console, line: str) -> None:
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
    parts = count_parameters(state.params)
    tokens = config.train.steps * config.train.batch_size * config.data.context
    epochs = tokens / sum(len(part.tokens) for part in data.training)
    warmup = effective_warmup(config.optimizer, config.train.steps)
    count = " + ".join(f"{count:,} {part}" for part, count in parts.items())
    lines = [
        *_changes(config),
        f"config      {path / 'config.toml'} has all options",
        f"device      {_devices(mesh)}, jax {jax.__version__}",
        f"parameters  {sum(parts.values()):,} = {count}",
        f"corpus      {data.describe()}",
        f"training    {config.train.steps:,} steps ({warmup:,} of warm-up), {tokens:,} tokens, {epochs:.2g} epochs",
        *notes,
    ]
    if progress.corpus not in ("", data.fingerprint):
        lines.append("changed     the corpus has changed since the run was started; training continues on the new one")
    done, new = int(state.step), "new" if progress.corpus else "imported, not trained yet"
    if done >= config.train.steps:
        lines.append(f"run         {path} is finished at step {done}; raise train.steps to continue it")
    else:
        lines.append(f"run         {path}, " + (f"resuming from step {done}" if done else new))
    for line in lines:
        _print(console, line)


def _changes(config: Config) -> list[str]:
    """A line for each table with options that are used and differ from their defaults."""
    defaults = options_by_name(Config())
    changes: dict[str, list[str]] = {}
    for name, value in options_by_name(config).items():
        table, _, option = name.rpartition(".")
        unused = table.startswith("mixer.") and table != f"mixer.{config.mixer.kind}"
        if value != defaults[name] and not unused:
            text = " ".join(map(str, value)) if isinstance(value, tuple) else value
            changes.setdefault(table, []).append(f"{option} {text}")
    return [f"config      [{table}] {', '.join(options)}" for table, options in changes.items()]


def _devices(mesh: Mesh | None) -> str:
    device, available, hosts = jax.devices()[0], jax.device_count(), jax.process_count()
    used = 1 if mesh is None else mesh.size
    text = f"{used} x {device.platform} ({device.device_kind})" + (f" over {hosts} processes" if hosts > 1 else "")
    if mesh is not None and used > 1:
        text += ", " + " x ".join(f"{name} {size}" for name, size in mesh.shape.items() if size > 1)
    if used < available:
        text += f"; {available - used} of {available} are idle: train.batch_size and [mesh] do not use them"
    return text


def _sample(config: Config, directory: RunDirectory, tokenizer: Tokenizer, state: TrainState, console: Console) -> None:
    """Writes and prints a continuation of `train.sample_prompt`."""
    graph, prompt = model_graph(config.model, config.mixer), config.train.sample_prompt
    _print(console, f"sample      {config.train.sample_tokens} tokens after {prompt!r}, in {directory.sample_file}")
    pieces = complete(
        graph,
        state.eval_params,
        tokenizer,
        [prompt],
        config.data.context,
        config.train.sample_tokens,
        sampling=Sampling(),
    )
    text = prompt + b"".join(piece for (piece,) in pieces).decode(errors="replace")
    on_leader(lambda: save_text(directory.sample_file, text))
    _print(console, text)
