"""What a run may be resumed with: its own checkpoints, options that leave the function as it is, repaired files."""

import contextlib
import dataclasses
import json
import shutil

import jax
import jax.numpy as jnp
import pytest
from etils import epath

from ldm_jax.config import AttentionImplementation, ComputeType, Config, MeshConfig, OptimizerName, Remat
from ldm_jax.config.toml import read_config
from ldm_jax.data import Batch
from ldm_jax.errors import UserError
from ldm_jax.files import acquire_lock
from ldm_jax.infer import load_model
from ldm_jax.memory import Backward
from ldm_jax.mixers import Form, HyperConfig, LDMConfig, MixerConfig, MixerKind
from ldm_jax.runs.changes import find_changes
from ldm_jax.runs.checkpoints import Checkpoints, Progress
from ldm_jax.runs.device import adapt, check_device
from ldm_jax.runs.run_directory import RunDirectory, checkpoint_directory, read_identity
from ldm_jax.runs.storage import require_writable
from ldm_jax.train.metrics import MetricsFile, read_metrics
from ldm_jax.train.step import make_train_step, state_shapes
from runs import assert_same_bits, quietly, tiny, with_optimizer, with_train, without_memory


@pytest.fixture
def run(finished, tmp_path):
    """The config, and a copy of the finished run."""
    shutil.copytree(finished[1], tmp_path / "run")
    return finished[0], tmp_path / "run"


def content(path):
    return {file: file.read_bytes() for file in path.rglob("*") if file.is_file()}


def claim(config, path, corpus="another corpus"):
    """The start of a run up to the claim of its checkpoints, which returns what has changed."""
    directory = RunDirectory(path)
    directory.check_former_store(config)
    require_writable(checkpoint_directory(config, path))
    store = Checkpoints(checkpoint_directory(config, path), 2)
    with contextlib.closing(directory), contextlib.closing(store):
        directory.open()
        return directory.claim(store, config, corpus)


def with_model(config, **options):
    return dataclasses.replace(config, model=dataclasses.replace(config.model, **options))


def with_data(config, **options):
    return dataclasses.replace(config, data=dataclasses.replace(config.data, **options))


def test_another_model_is_refused_and_nothing_is_touched(finished):
    config, path, state, _ = finished
    before = content(path)
    other = dataclasses.replace(config, mixer=MixerConfig(MixerKind.LDM, ldm=config.mixer.ldm))
    with pytest.raises(UserError, match=r"mixer\.kind was preln and is now ldm"):
        quietly(other, path)
    with pytest.raises(UserError, match=r"train\.seed was 0 and is now 1"):
        quietly(with_train(config, seed=1), path)
    with pytest.raises(UserError, match=r"optimizer\.name was adamw and is now muon"):
        quietly(with_optimizer(config, name=OptimizerName.MUON), path)
    assert content(path) == before
    assert_same_bits(load_model(path).params, state.params)


@pytest.mark.parametrize(
    ("changed", "option"),
    [
        (with_model(Config(), attention=AttentionImplementation.LOCAL), "model.attention"),
        (with_model(Config(), compute_dtype=ComputeType.BFLOAT16), "model.compute_dtype"),
        (with_data(Config(), context=128), "data.context"),
        (with_data(Config(), separate_documents=True), "data.separate_documents"),
        (dataclasses.replace(Config(), mixer=MixerConfig(ldm=LDMConfig(alpha=3.0))), "mixer.ldm.alpha"),
        (with_optimizer(Config(), ema=0.5), "optimizer.ema > 0"),
    ],
)
def test_what_a_checkpoint_does_not_fit(changed, option):
    (change,) = find_changes(Config(), changed).model
    assert change.startswith(f"{option} was ")


def test_what_may_change():
    config = Config(
        mixer=MixerConfig(
            MixerKind.LDM, backward=Backward.STORED, ldm=LDMConfig(form=Form.DUAL), hc=HyperConfig(streams=3)
        )
    )
    config = with_data(config, path="moved/*.txt", verify=False)
    execution = {"scan": False, "remat": Remat.DOTS, "loss_chunk": 7, "attention": AttentionImplementation.FLASH}
    model, text, others = find_changes(Config(), with_train(with_model(config, **execution), steps=7))
    assert model == []
    assert [change.split()[0] for change in text] == ["data.path"]
    assert {change.split()[0] for change in others} == {
        *(f"model.{name}" for name in execution), "mixer.backward", "mixer.ldm.form", "data.verify", "train.steps",
    }  # fmt: skip


@pytest.mark.parametrize("kind", MixerKind)
def test_the_parameters_do_not_depend_on_the_scan(kind):
    config = dataclasses.replace(tiny("*"), mixer=MixerConfig(kind))
    scanned, looped = (state_shapes(with_model(config, scan=scan)).params for scan in (True, False))
    assert scanned == looped


def test_a_leaner_backward_mode_and_unused_options(run):
    config, path = run
    config = dataclasses.replace(
        config, mixer=MixerConfig(MixerKind.PRELN, backward=Backward.STORED, hc=HyperConfig(streams=3))
    )
    _, output = quietly(config, path)
    assert "changed     mixer.backward was None and is now stored" in output
    assert "unused      mixer.hc.streams is 3, but mixer.kind is preln" in output
    assert "is finished at step 6" in output


def test_the_same_text_elsewhere_and_another_text(run, tmp_path):
    config, path = run
    moved = with_data(config, path=str(tmp_path / "moved" / "*.txt"))
    corpus = load_model(path).corpus
    (change,) = claim(moved, path, corpus)
    assert change.startswith("data.path was ")
    with pytest.raises(UserError, match=r"another text: data\.path was .*corpus.* and is now .*moved"):
        claim(moved, path)
    assert claim(config, path) == []  # the same files, whose text has changed
    shutil.rmtree(path / "checkpoints")
    assert claim(moved, path) == []  # no checkpoint that would not fit


def test_a_store_of_another_run_is_refused(run, tmp_path):
    config, path = run
    store = path / "checkpoints"
    before = content(path)
    sharing = with_train(config, checkpoints=str(store))
    with pytest.raises(UserError, match=rf"{store} holds the checkpoints of the run .*finished, not of .*other"):
        claim(sharing, tmp_path / "other")
    assert content(path) == before
    with pytest.raises(UserError, match=rf"{store} holds the checkpoints of the run .*finished, not of .*elsewhere"):
        claim(sharing, tmp_path / "elsewhere" / "finished")  # whose name is the same, but the run is still there
    # A run of the same name whose directory was lost resumes.
    identity = read_identity(store / ".run")
    (store / ".run").write_text(json.dumps(identity._replace(run=str(tmp_path / "gone" / "finished"))._asdict()))
    assert claim(sharing, tmp_path / "elsewhere" / "finished")[0].startswith("train.checkpoints was None")
    shutil.copytree(path, tmp_path / "third")
    (tmp_path / "third" / ".lock").write_text('{"id": "3", "run": "third"}')
    for use in (load_model, lambda third: claim(config, third)):
        with pytest.raises(UserError, match=r"holds the checkpoints of the run .*finished, not of .*third"):
            use(tmp_path / "third")


def test_a_copy_is_another_run(finished, tmp_path):
    config, path, *_ = finished
    shutil.copytree(path, tmp_path / "copy")
    with pytest.raises(UserError, match=r"holds the checkpoints of the run .*finished, not of .*copy"):
        claim(with_train(config, checkpoints=str(path / "checkpoints")), tmp_path / "copy")
    claim(config, tmp_path / "copy")
    ids = {read_identity(directory / ".lock").id for directory in (path, tmp_path / "copy")}
    assert len(ids) == 2
    store = tmp_path / "store"
    shutil.copytree(path / "checkpoints", store)
    (tmp_path / "backup").mkdir()
    shutil.copytree(path, tmp_path / "backup" / path.name)
    with pytest.raises(UserError, match=r"holds the checkpoints of the run .*finished, not of .*backup"):
        claim(with_train(config, checkpoints=str(store)), tmp_path / "backup" / path.name)
    (tmp_path / "copy").rename(tmp_path / "moved")
    claim(config, tmp_path / "moved")
    assert read_identity(tmp_path / "moved" / ".lock").id in ids


def test_a_directory_of_a_start_that_was_killed_early_is_used(tmp_path):
    for file in (tmp_path / ".lock", tmp_path / "checkpoints" / ".run", tmp_path / "checkpoints" / ".writable.0"):
        file.parent.mkdir(exist_ok=True)
        file.touch()
    directory = RunDirectory(tmp_path)
    directory.open()
    directory.close()
    (tmp_path / "checkpoints" / "mine.pt").touch()
    with pytest.raises(UserError, match=r"holds other files \(checkpoints\)"):
        directory.open()


def test_a_store_in_use_is_refused(run, tmp_path):
    config, path = run
    (path / "checkpoints" / ".run").unlink()
    lock = acquire_lock(path / "checkpoints" / ".run", "training in", "--run")
    with lock, pytest.raises(UserError, match=r"another process .*checkpoints"):
        claim(with_train(config, checkpoints=str(path / "checkpoints")), tmp_path / "finished")


def test_a_store_of_an_earlier_version_is_claimed(run, tmp_path):
    config, path = run
    for file in (path / ".lock", path / "checkpoints" / ".run", path / "config.toml"):
        file.unlink()
    claim(config, path)
    assert (path / ".lock").read_text() == (path / "checkpoints" / ".run").read_text()
    with pytest.raises(UserError, match="holds the checkpoints of the run"):
        claim(with_train(config, checkpoints=str(path / "checkpoints")), tmp_path / "other")
    (path / "checkpoints" / ".run").unlink()
    with pytest.raises(UserError, match=r"do not name their run, .*train\.checkpoints was None"):
        claim(with_train(config, checkpoints=str(path / "checkpoints")), tmp_path / "other")


def test_checkpoints_that_stayed_elsewhere_are_not_forgotten(run, tmp_path):
    config, path = run
    with pytest.raises(UserError, match=rf"are in {path / 'checkpoints'}, .*train.checkpoints is now .*new"):
        claim(with_train(config, checkpoints=str(tmp_path / "new")), path)


@pytest.mark.parametrize("broken", [None, "[mod"])
def test_a_lost_config_is_restored(run, broken, capsys):
    config, path = run
    (path / "config.toml").unlink() if broken is None else (path / "config.toml").write_text(broken)
    assert load_model(path).config == config
    assert "the config of the last checkpoint is used" in capsys.readouterr().err
    _, output = quietly(config, path)
    assert read_config(path / "config.toml") == config
    if broken is None:
        assert "config.toml was lost" in output
    else:
        assert "config.before.toml" in output
        assert (path / "config.before.toml").read_text() == broken


@pytest.mark.parametrize("line", ["{garb", "5", '{"loss": 1}', "\udcff"])
def test_an_invalid_line_of_metrics_is_set_aside(tmp_path, line, capsys):
    path = tmp_path / "metrics.jsonl"
    path.write_text(f'{{"step": 1}}\n{line}\n{{"step": 2}}\n', errors="surrogateescape")
    before = path.read_bytes()
    assert read_metrics(path) == [{"step": 1}, {"step": 2}]
    assert "line 2 of" in capsys.readouterr().err
    file = MetricsFile(path, 1)
    file.close()
    assert "line 2 is not a row" in file.warning
    assert path.read_text() == '{"step": 1}\n'
    assert (tmp_path / "metrics.before.jsonl").read_bytes() == before


def test_rows_without_checkpoints_are_kept(tmp_path):
    path = tmp_path / "metrics.jsonl"
    for name in ("metrics.before.jsonl", "metrics.before1.jsonl"):
        path.write_text('{"step": 10}\n{"step": 20}\n')
        file = MetricsFile(path, 0)  # killed before its first checkpoint, or the checkpoints are lost
        file.close()
        assert str(tmp_path / name) in file.warning
        assert len(read_metrics(tmp_path / name)) == 2
        assert path.read_text() == ""


def test_no_leaf_of_the_state_depends_on_the_64_bit_mode(corpus):
    config = with_optimizer(without_memory(tiny(corpus)), name=OptimizerName.MUON, ema=0.9)
    batch = jax.ShapeDtypeStruct((4, 17), jnp.int32)
    expected = state_shapes(config)
    with jax.enable_x64(True):
        assert state_shapes(config) == expected
        step = make_train_step(config)
        assert jax.eval_shape(step, expected, Batch(batch, None))[0] == expected


def test_a_run_is_loaded_in_64_bit_mode(finished):
    with jax.enable_x64(True):
        assert_same_bits(load_model(finished[1]).params, finished[2].params)


def test_a_checkpoint_with_64_bit_leaves(finished, tmp_path):
    """As earlier versions wrote them in 64-bit mode."""
    like = finished[2]
    require_writable(epath.Path(tmp_path))
    checkpoints = Checkpoints(tmp_path, 2)
    with jax.enable_x64(True):
        losses = like.losses._replace(mean=jnp.float64(0.1), variance=jnp.float64(2.5))
        assert checkpoints.save(6, like._replace(losses=losses), Progress(1, 1.0, "", "", {})) is None
        assert checkpoints.wait() is None
        state, _, _ = checkpoints.restore_latest(like)
        assert state.losses.mean == jnp.float32(0.1)
        assert state.losses.mean.dtype == jnp.float32
        wider = like.params | {"embed": {"embedding": jnp.zeros((300, 16), jnp.float32)}}
        with pytest.raises(UserError, match=r"embedding is float32\[256,16\] in it, but must be float32\[300,16\]"):
            checkpoints.restore_latest(like._replace(params=wider))
    with pytest.raises(UserError, match=r"losses\.mean is float64\[\]\): set JAX_ENABLE_X64=1"):
        checkpoints.restore_latest(like)
    checkpoints.close()


def test_a_trained_model_is_used_on_any_device():
    fused = LDMConfig(groups=1, form=Form.FUSED)
    config = with_model(Config(), attention=AttentionImplementation.CUDNN, compute_dtype=ComputeType.BFLOAT16)
    config = dataclasses.replace(config, mixer=MixerConfig(ldm=fused))
    adapted, replaced = adapt(config)
    assert adapted.model.attention is AttentionImplementation.XLA
    assert adapted.mixer.ldm == dataclasses.replace(fused, form=Form.RECURRENT)
    assert [phrase.split()[0] for phrase in replaced] == ["model.attention", "mixer.ldm.form"]
    assert find_changes(config, adapted).model == []
    with pytest.raises(UserError, match=r"model\.attention is cudnn"):
        check_device(config)


def test_a_mesh_that_does_not_fit_one_device_is_refused(corpus, tmp_path):
    config = without_memory(tiny(corpus))
    with pytest.raises(UserError, match="tensor 64 does not fit 1 device: the product must divide 1"):
        quietly(dataclasses.replace(config, mesh=MeshConfig(tensor=64)), tmp_path / "run")
