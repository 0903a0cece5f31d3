"""Configs: read strictly, written whole, wrong ones named in a sentence."""

import dataclasses
import typing

import pytest

from ldm_jax.config import Config, Corpus, DataConfig, ModelConfig, Remat, TrainConfig
from ldm_jax.config.toml import config_to_toml, options_by_name, read_config
from ldm_jax.errors import UserError
from ldm_jax.mixers import Form, LDMConfig, MixerConfig, MixerKind, Write


def write(tmp_path, text):
    path = tmp_path / "config.toml"
    path.write_text(text)
    return path


def test_what_is_written_is_read_again(tmp_path):
    config = Config(mixer=MixerConfig(MixerKind.PRELN, LDMConfig(groups=2, forgetting_floor=0.5, write=Write.DELTA)))
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, remat=Remat.DOTS, kv_heads=2))
    assert read_config(write(tmp_path, config_to_toml(config))) == config
    assert read_config(write(tmp_path, config_to_toml(Config()))) == Config()
    data = DataConfig(corpora=("a", "b"), weights=(1.0, 0.5), verify=False)
    config = Config(model=ModelConfig(vocabulary=100), data=data)
    assert read_config(write(tmp_path, config_to_toml(config))) == config


def test_every_option_has_a_name():
    options = options_by_name(Config(train=TrainConfig(seed=3)))
    assert options["train.seed"] == 3
    assert options["train.checkpoints"] is None
    assert options["mixer.ldm.groups"] == Config().mixer.ldm.groups
    assert options_by_name(TrainConfig(), "train") == {
        name: value for name, value in options_by_name(Config()).items() if name.startswith("train.")
    }


def test_defaults_for_what_is_left_out(tmp_path):
    config = read_config(write(tmp_path, '[mixer.ldm]\nalpha = 3\n[data]\ncorpus = "stdlib"\n'))
    assert config.mixer.ldm.alpha == 3.0
    assert isinstance(config.mixer.ldm.alpha, float)
    assert config.data.corpus is Corpus.STDLIB
    assert config.model == Config().model


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[model\n", "is not valid TOML"),
        ("[modle]\n", "unknown key modle: did you mean model?"),
        ("[model]\ndeph = 3\n", r"\[model\] has an unknown key deph: did you mean depth\?"),
        ("[model]\nxyzzy = 3\n", "there are depth, width"),
        ("[mixer.ldm]\nalphas = 1\n", r"\[mixer.ldm\] has an unknown key alphas: did you mean alpha"),
        ("model = 3\n", r"\[model\] is 3, but it must be a table"),
        ("[model]\ndepth = 3.0\n", "model.depth is 3.0, but it must be a whole number"),
        ("[model]\ndepth = true\n", "model.depth is True, but it must be a whole number"),
        ('[model]\nscan = "yes"\n', "model.scan is 'yes', but it must be true or false"),
        ('[model]\nremat = "blok"\n', "model.remat is 'blok', but it must be one of block, dots"),
        ('[mixer]\nkind = "LDM"\n', "mixer.kind is 'LDM', but it must be one of preln, ldm"),
        ('[optimizer]\nlearning_rate = "1e-3"\n', "optimizer.learning_rate is '1e-3', but it must be a number"),
        ("[optimizer]\nlearning_rate = nan\n", "learning_rate is nan"),
        ("[train]\nsteps = 0\n", "steps is 0, but it must be at least 1"),
        ("[train]\nbatch_size = 8\naccumulation = 3\n", "accumulation is 3, which does not divide batch_size 8"),
        ("[model]\nwidth = 130\nheads = 13\n[mixer.ldm]\ngroups = 4\n", "groups is 4, which does not divide the width"),
        ('[data]\ncorpus = "files"\n', "there is no path"),
        ('[data]\ncorpus = "stdlib"\npath = "x"\n', "corpus is stdlib, which has none"),
        ('[data]\ncorpora = "a"\n', "data.corpora is 'a', but it must be a list"),
        ('[data]\ncorpora = ["a", 3]\n', "data.corpora, element 2 is 3, but it must be a string"),
        ('[data]\ncorpora = ["a"]\nweights = ["x"]\n', "data.weights, element 1 is 'x', but it must be a number"),
        ('[data]\ncorpora = ["a"]\nweights = [1, 2]\n', "weights has 2 numbers for 1 corpora"),
        ('[data]\ncorpora = ["a", "b"]\nweights = [1, 0]\n', "a weight is 0.0, but weights must be positive"),
        ('[data]\ncorpora = ["a", "a"]\n', "corpora has a folder twice"),
        ('[data]\ncorpora = ["a"]\npath = "x"\n', "there are corpora, which are prepared: leave data.path out"),
        ('[data]\ncorpora = ["a"]\ncorpus = "stdlib"\n', "there are corpora, which are prepared"),
        ('[data]\ncorpus = "prepared"\n', "corpus is prepared, but there are no corpora"),
        ("[model]\nvocabulary = 128\n", "vocabulary is 128, but the tokens are bytes"),
        ("[data]\nvalidation_fraction = 1\n", "validation_fraction is 1.0"),
    ],
)
def test_wrong_files(tmp_path, text, words):
    with pytest.raises(UserError, match=words) as error:
        read_config(write(tmp_path, text))
    assert "config.toml" in str(error.value)


def test_files_that_cannot_be_read(tmp_path):
    with pytest.raises(UserError, match="there is no config file"):
        read_config(tmp_path / "missing.toml")
    with pytest.raises(UserError, match="cannot be read"):
        read_config(tmp_path)
    (tmp_path / "latin.toml").write_bytes(b"# \xff\n")
    with pytest.raises(UserError, match="cannot be read"):
        read_config(tmp_path / "latin.toml")


def test_a_kind_ignores_the_options_of_the_others():
    # groups that do not divide the width are no error where the memory is off
    config = Config(mixer=MixerConfig(MixerKind.PRELN, LDMConfig(groups=7)))
    assert config.mixer.kind is MixerKind.PRELN
    with pytest.raises(ValueError, match="groups is 7"):
        Config(mixer=MixerConfig(MixerKind.LDM, LDMConfig(groups=7)))


def fields(cls):
    for field in dataclasses.fields(cls):
        hint = typing.get_type_hints(cls)[field.name]
        if dataclasses.is_dataclass(hint):
            yield from fields(hint)
        else:
            yield cls, field.name, hint


def test_no_option_is_a_free_string():
    # A string that is looked up somewhere would let a typo mean "off". Paths, prompts and foreign names are not.
    strings = {name for _, name, hint in fields(Config) if hint in (str, str | None)}
    assert strings == {"path", "checkpoints", "sample_prompt", "wandb_project"}


@pytest.mark.usefixtures("unchecked_annotations")
def test_a_string_that_is_a_choice_becomes_it():
    assert LDMConfig(form="dual").form is Form.DUAL
    assert LDMConfig(form="dual") == LDMConfig(form=Form.DUAL)


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (
            lambda: LDMConfig(form="duel"),
            "form is 'duel', but it must be one of recurrent, dual, fused",
        ),
        (lambda: MixerConfig(backward="undo"), "backward is 'undo', but it must be one of stored, remat"),
        (lambda: MixerConfig(kind="x"), "kind is 'x', but it must be one of preln, ldm"),
        (lambda: MixerConfig(ldm=None), "ldm is None, but it must be a LDMConfig"),
        (lambda: DataConfig(corpora="books"), "corpora is 'books', but it must be a tuple"),
        (lambda: DataConfig(corpora=("a", 3)), "an element of corpora is 3, but it must be a string"),
        (lambda: DataConfig(corpora=("a",), weights=(float("nan"),)), "an element of weights is nan"),
        (lambda: LDMConfig(key_dim=2.5), "key_dim is 2.5, but it must be a whole number"),
        (lambda: LDMConfig(groups=True), "groups is True, but it must be a whole number"),
        (lambda: LDMConfig(unit_keys=1), "unit_keys is 1, but it must be True or False"),
        (lambda: LDMConfig(initial_gain=float("nan")), "initial_gain is nan, but it must be a number"),
        (lambda: LDMConfig(initial_gain=float("inf")), "initial_gain is inf, but it must be finite"),
        (lambda: LDMConfig(alpha=1e300), "alpha is 1e.300, but it must be positive, from 1e-30 to 1e30"),
    ],
)
def test_options_have_their_types_in_python_too(unchecked_annotations, make, sentence):
    with pytest.raises(ValueError, match=sentence):
        make()
    assert LDMConfig(alpha=3).alpha == 3
