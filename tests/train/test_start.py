"""Starting from another run: growing a memory, a frozen backbone, and what does not fit."""

import contextlib
import dataclasses
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from ldm_jax.config import Config, OptimizerConfig, TrainedPart
from ldm_jax.data import Batch, load_data
from ldm_jax.errors import UserError
from ldm_jax.infer import load_model
from ldm_jax.memory import Backward
from ldm_jax.mixers import LDMConfig, MixerConfig, MixerKind, Write
from ldm_jax.nn import model_graph, split_mixer
from ldm_jax.runs.changes import find_changes
from ldm_jax.runs.checkpoints import Checkpoints
from ldm_jax.runs.run_directory import param_shapes
from ldm_jax.train import make_state, make_train_step
from ldm_jax.train.start import start
from ldm_jax.train.step import state_shapes
from runs import assert_same_bits, quietly, tiny, with_optimizer, with_train


def grown(config, backward=Backward.STORED, **options):
    """The config with a memory that is not read at first."""
    ldm = dataclasses.replace(config.mixer.ldm, groups=2, key_dim=2, latent_dim=4, initial_gain=0.0, **options)
    return dataclasses.replace(config, mixer=MixerConfig(backward=backward, ldm=ldm))


def bytes_of(tree):
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


MODES = [
    (write, backward)
    for write in Write
    for backward in Backward
    if backward is not Backward.REVERSIBLE or LDMConfig(write=write).irreversible is None
]


@pytest.mark.parametrize(
    ("write", "backward"),
    [
        each if each == (Write.RLS, Backward.REVERSIBLE) else pytest.param(*each, marks=pytest.mark.slow)
        for each in MODES
    ],
)
def test_growing_changes_no_logit(finished, write, backward):
    base, _, trained, _ = finished
    config = grown(base, backward, write=write)
    params = make_state(config, given=jax.tree.map(jnp.copy, trained.params)).params
    mixer, backbone = split_mixer(params)
    assert_same_bits(backbone, trained.params)
    assert_same_bits(mixer, split_mixer(make_state(config).params)[0])  # as in a new model
    tokens = jnp.asarray(np.random.default_rng(0).integers(256, size=(2, 16)))
    logits = [
        jax.jit(lambda params, each=each: nnx.merge(model_graph(each.model, each.mixer), params)(tokens))(params)
        for each, params in ((base, trained.params), (config, params))
    ]
    np.testing.assert_array_equal(*logits)


def test_a_frozen_backbone(finished, tmp_path):
    base = tmp_path / "base"
    shutil.copytree(finished[1], base)
    expected = load_model(tmp_path / "base@4")
    config = dataclasses.replace(finished[0], mixer=MixerConfig(MixerKind.DENSEFORMER))
    config = with_train(config, init=f"{base}@4", seed=1, checkpoint_every=3, steps=3)
    config = with_optimizer(config, train=TrainedPart.MIXER, ema=0.5, learning_rate=0.1)
    state, output = quietly(config, tmp_path / "run")
    assert "base, step 4" in output
    assert "as in a new model: blocks.mlp.mixer\n" in output
    assert "mixer.kind was preln and is now denseformer" in output
    (losses,) = (line.split("loss ")[1].split() for line in output.splitlines() if "held-out loss" in line)
    assert losses[0] == losses[-4]
    shutil.rmtree(base)  # a resumed run does not need it
    _, output = quietly(with_train(config, init=None), tmp_path / "run")
    assert "is finished at step 3" in output
    run = load_model(tmp_path / "run")
    assert run.averaged
    mixer, backbone = split_mixer(run.params)
    assert_same_bits(backbone, expected.params)
    assert_same_bits(split_mixer(state.params)[1], expected.params)
    assert_same_bits(mixer, state.average)
    assert any(
        (a != b).any() for a, b in zip(*map(jax.tree.leaves, (mixer, split_mixer(state.params)[0])), strict=True)
    )
    assert bytes_of(state.optimizer) == pytest.approx(2 * bytes_of(mixer), abs=100)


@pytest.mark.slow
@pytest.mark.parametrize("backward", Backward)
def test_a_frozen_backbone_needs_no_memory_for_gradients(corpus, backward):
    def compiled(part):
        config = grown(tiny(corpus), backward)
        config = dataclasses.replace(config, model=dataclasses.replace(config.model, width=256, mlp_width=768))
        state = state_shapes(with_optimizer(config, train=part))
        batch = Batch(jax.ShapeDtypeStruct((4, 17), jnp.int32), None)
        step = make_train_step(with_optimizer(config, train=part)).lower(state, batch).compile()
        return step.memory_analysis(), bytes_of(split_mixer(state.params)[1])

    (whole, backbone), (frozen, _) = compiled(TrainedPart.ALL), compiled(TrainedPart.MIXER)
    assert whole.argument_size_in_bytes - frozen.argument_size_in_bytes == 2 * backbone
    assert whole.temp_size_in_bytes - frozen.temp_size_in_bytes > 0.9 * backbone


def test_what_does_not_fit_is_refused_by_name(finished, monkeypatch):
    config, path = with_train(finished[0], init=str(finished[1])), finished[1]
    data = load_data(config.data, 256)
    for options, words in (
        ({"width": 32}, r"; embed\.embedding is \[256, 16\] there, but \[256, 32\] in this model;"),
        ({"tied": False}, r"head\.kernel is absent there"),
        ({"qk_norm": False}, r"query_norm\.scale is \[.*\] there, but absent in this model"),
    ):
        other = dataclasses.replace(config, model=dataclasses.replace(config.model, **options))
        with pytest.raises(UserError, match=words):
            start(other, data, None)
    monkeypatch.setattr(data.tokenizer, "fingerprint", "another")
    with pytest.raises(UserError, match=f"{path} was trained with another tokenizer"):
        start(config, data, None)
    with pytest.raises(UserError, match="nowhere holds no run"):
        start(with_train(config, init="nowhere"), data, None)
    with pytest.raises(ValueError, match=r"optimizer\.train is mixer, but mixer\.kind is preln"):
        Config(mixer=MixerConfig(MixerKind.PRELN), optimizer=OptimizerConfig(train=TrainedPart.MIXER))


def test_the_checkpoint_of_a_step(finished, tmp_path):
    _, path, state, _ = finished
    earlier = load_model(Path(f"{path}@4"))
    assert (earlier.step, earlier.path) == (4, path)
    assert_same_bits(load_model(Path(f"{path}@6")).params, state.params)
    with pytest.raises(UserError, match=r"no checkpoint of step 5: the steps kept are 4, 6\."):
        load_model(Path(f"{path}@5"))
    named = tmp_path / "run@7"
    shutil.copytree(path, named)
    assert load_model(named).step == 6
    (named / "checkpoints" / "6").rename(named / "checkpoints" / "8")
    with pytest.raises(UserError, match="it holds the state of step 6"):
        load_model(Path(f"{named}@8"))
    with contextlib.closing(Checkpoints(named / "checkpoints", keep=1)) as checkpoints:
        shutil.rmtree(named / "checkpoints" / "4")  # as by a process that trains the run
        with pytest.raises(UserError, match=r"no checkpoint of step 4: the steps kept are 8\."):
            checkpoints.restore_params(param_shapes(earlier.config.model, earlier.config.mixer), 4)


def test_the_origin_of_a_run_does_not_change():
    config = with_train(Config(), init="a")
    assert find_changes(config, Config()) == ([], [], [])
    for old, new in ((config, with_train(config, init="b")), (Config(), config)):
        (change,) = find_changes(old, new).model
        assert change.startswith("train.init was ")
    frozen = with_optimizer(Config(), train=TrainedPart.MIXER)
    assert find_changes(Config(), frozen).model == ["optimizer.train was all and is now mixer"]
