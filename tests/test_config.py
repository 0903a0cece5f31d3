"""Configs: read strictly, written in full, errors that name the option and its value."""

import dataclasses
import typing

import pytest

from ldm_jax.config import Config, Corpus, DataConfig, ModelConfig, Remat, TrainConfig
from ldm_jax.config.toml import config_to_toml, options_by_name, read_config, read_methods
from ldm_jax.errors import UserError
from ldm_jax.mixers import Form, LDMConfig, MixerConfig, MixerKind, Write


def write(tmp_path, text, name="config.toml"):
    path = tmp_path / name
    path.write_text(text)
    return path


def test_a_written_config_is_read_again(tmp_path):
    config = Config(
        mixer=MixerConfig(MixerKind.PRELN, ldm=LDMConfig(groups=2, forgetting_floor=0.5, write=Write.DELTA))
    )
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


def test_options_that_are_left_out_have_defaults(tmp_path):
    config = read_config(write(tmp_path, '[mixer.ldm]\nalpha = 3\n[data]\ncorpus = "stdlib"\n'))
    assert config.mixer.ldm.alpha == 3.0
    assert isinstance(config.mixer.ldm.alpha, float)
    assert config.data.corpus is Corpus.STDLIB
    assert config.model == Config().model


def test_a_config_overrides_its_base(tmp_path):
    (tmp_path / "other").mkdir()
    write(tmp_path, "[model]\ndepth = 3\nwidth = 64\n[train]\nsteps = 7\n", "first.toml")
    write(tmp_path, 'base = "../first.toml"\nmixer.kind = "preln"\n[model]\ndepth = 5\n', "other/second.toml")
    third = write(tmp_path, 'base = "other/second.toml"\ntrain.steps = 9\n', "third.toml")
    config = read_config(third)
    assert (config.model.depth, config.model.width, config.train.steps) == (5, 64, 9)
    assert config.mixer.kind is MixerKind.PRELN
    assert read_methods([third]) == {"third": config}
    write(tmp_path, "[model]\ndeph = 3\n", "first.toml")
    with pytest.raises(UserError, match=r"third.toml.*second.toml.*deph.*depth"):
        read_config(third)


def test_wrong_bases(tmp_path):
    one = write(tmp_path, 'base = "two.toml"\n', "one.toml")
    with pytest.raises(UserError, match=r"no config file .*two.toml"):
        read_config(one)
    two = write(tmp_path, 'base = "./one.toml"\n', "two.toml")
    for file in (one, two, write(tmp_path, 'base = "itself.toml"\n', "itself.toml")):
        with pytest.raises(UserError, match="base"):
            read_config(file)
    with pytest.raises(UserError, match="base is 3"):
        read_config(write(tmp_path, "base = 3\n"))


@pytest.mark.parametrize(("old", "new"), [("undone", "reversible"), ("recomputed", "remat")])
def test_a_renamed_value_names_the_new_one(tmp_path, old, new):
    with pytest.raises(UserError, match=rf"mixer.backward is '{old}'.*'{new}'"):
        read_config(write(tmp_path, f'[mixer]\nbackward = "{old}"\n'))
    assert read_config(write(tmp_path, f'[mixer]\nbackward = "{new}"\n')).mixer.backward == new


def test_a_removed_option_is_ignored_at_its_last_value(tmp_path):
    assert read_config(write(tmp_path, '[mixer.ldm]\nread_into = "branch"\n')) == Config()
    with pytest.raises(UserError, match=r"mixer.ldm.read_into is 'stream'.*removed"):
        read_config(write(tmp_path, '[mixer.ldm]\nread_into = "stream"\n'))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[model\n", "TOML"),
        ("[modle]\n", r"modle.*model\?"),
        ("[model]\ndeph = 3\n", r"\[model\].*deph.*depth\?"),
        ("[model]\nxyzzy = 3\n", "xyzzy.*depth, width"),
        ("[mixer.ldm]\nalphas = 1\n", r"\[mixer.ldm\].*alphas.*alpha"),
        ("model = 3\n", r"\[model\] is 3.*table"),
        ("[model]\ndepth = 3.0\n", "model.depth is 3.0.*whole number"),
        ("[model]\ndepth = true\n", "model.depth is True.*whole number"),
        ('[model]\nscan = "yes"\n', "model.scan is 'yes'.*true or false"),
        ('[model]\nremat = "blok"\n', "model.remat is 'blok'.*block, dots"),
        ('[mixer]\nkind = "LDM"\n', "mixer.kind is 'LDM'.*preln, ldm"),
        ('[optimizer]\nlearning_rate = "1e-3"\n', "optimizer.learning_rate is '1e-3'.*a number"),
        ("[optimizer]\nlearning_rate = nan\n", "optimizer.learning_rate is nan"),
        ("[optimizer]\nweight_decay = -1\n", "weight_decay is -1"),
        ("[optimizer]\nz_loss = inf\n", "z_loss is inf"),
        ("[train]\nsteps = 0\n", "steps is 0"),
        ("[train]\nbatch_size = 8\naccumulation = 3\n", "accumulation is 3.*batch_size 8"),
        ("[model]\nwidth = 130\nheads = 13\n[mixer.ldm]\ngroups = 4\n", "groups is 4.*width"),
        ('[data]\ncorpus = "files"\n', "corpus is files.*path"),
        ('[data]\ncorpus = "stdlib"\npath = "x"\n', 'path is "x".*corpus is stdlib'),
        ('[data]\ncorpora = "a"\n', "data.corpora is 'a'.*list"),
        ('[data]\ncorpora = ["a", 3]\n', "data.corpora, element 2 is 3.*string"),
        ('[data]\ncorpora = ["a"]\nweights = ["x"]\n', "data.weights, element 1 is 'x'.*number"),
        ('[data]\ncorpora = ["a"]\nweights = [1, 2]\n', "weights has 2 numbers for 1 corpora"),
        ('[data]\ncorpora = ["a", "b"]\nweights = [1, 0]\n', "weights has 0.0"),
        ('[data]\ncorpora = ["a", "a"]\n', r"corpora is \('a', 'a'\)"),
        ('[data]\ncorpora = ["a"]\npath = "x"\n', "corpora is .*path"),
        ('[data]\ncorpora = ["a"]\ncorpus = "stdlib"\n', "corpora is .*corpus"),
        ('[data]\ncorpus = "prepared"\n', "corpus is prepared.*corpora"),
        ("[model]\nvocabulary = 128\n", "vocabulary is 128"),
        ("[data]\nvalidation_fraction = 1\n", "validation_fraction is 1.0"),
        ("[variants.one]\n", "variants.*compare.py"),
    ],
)
def test_wrong_files(tmp_path, text, words):
    with pytest.raises(UserError, match=words) as error:
        read_config(write(tmp_path, text))
    assert "config.toml" in str(error.value)


def test_files_that_cannot_be_read(tmp_path):
    with pytest.raises(UserError, match=r"no config file .*missing.toml"):
        read_config(tmp_path / "missing.toml")
    with pytest.raises(UserError, match="cannot be read"):
        read_config(tmp_path)
    (tmp_path / "latin.toml").write_bytes(b"# \xff\n")
    with pytest.raises(UserError, match=r"latin.toml cannot be read"):
        read_config(tmp_path / "latin.toml")


def test_variants(tmp_path):
    base = Config(mixer=MixerConfig(MixerKind.LDM), train=TrainConfig(steps=20))
    write(tmp_path, config_to_toml(base), "base.toml")
    variants = 'base = "base.toml"\n[variants.plain]\n[variants.wide.mixer.ldm]\nkey_dim = 6\n[variants.wide.model]\n'
    found = read_methods([write(tmp_path, variants + "depth = 3\n")])
    assert found["plain"] == base
    assert (found["wide"].mixer.ldm.key_dim, found["wide"].model.depth, found["wide"].train.steps) == (6, 3, 20)
    common = variants.replace("[variants.pl", "[model]\ndepth = 5\n[variants.pl") + "depth = 3\n"
    assert [config.model.depth for config in read_methods([write(tmp_path, common)]).values()] == [5, 3]
    for text, words in (
        (common.replace("[model]", "[modle]"), "unknown key modle"),
        ('base = "base.toml"\n[variants.bad.mixer.ldm]\nkey_dmi = 8\n', "variant bad.*key_dmi.*key_dim"),
        ('base = "nothing.toml"\n[variants.bad]\n', "no config file .*nothing.toml"),
        ('based = "base.toml"\n[variants.bad]\n', "unknown key based"),
        ("variants = 3\n", "variants is 3"),
    ):
        with pytest.raises(UserError, match=words):
            read_methods([write(tmp_path, text)])
    with pytest.raises(UserError, match="two configs named base"):
        read_methods([tmp_path / "base.toml"] * 2)
    with pytest.raises(UserError, match="no config"):
        read_methods([])


def test_the_options_of_unused_mixers_are_not_checked():
    config = Config(mixer=MixerConfig(MixerKind.PRELN, ldm=LDMConfig(groups=7)))
    assert config.mixer.kind is MixerKind.PRELN
    with pytest.raises(ValueError, match="groups is 7"):
        Config(mixer=MixerConfig(MixerKind.LDM, ldm=LDMConfig(groups=7)))


def fields(cls):
    for field in dataclasses.fields(cls):
        hint = typing.get_type_hints(cls)[field.name]
        if dataclasses.is_dataclass(hint):
            yield from fields(hint)
        else:
            yield cls, field.name, hint


def test_no_option_is_a_free_string():
    # Choices are enums, so that a typo is an error. Paths, prompts and names of projects are strings.
    strings = {name for _, name, hint in fields(Config) if hint in (str, str | None)}
    assert strings == {"path", "validation_path", "checkpoints", "init", "sample_prompt", "wandb_project"}


@pytest.mark.usefixtures("unchecked_annotations")
def test_options_are_converted_to_their_types():
    assert LDMConfig(form="dual").form is Form.DUAL
    assert LDMConfig(form="dual") == LDMConfig(form=Form.DUAL)
    assert isinstance(LDMConfig(alpha=3).alpha, float)
    assert DataConfig(corpora=["a"], weights=[1]) == DataConfig(corpora=("a",), weights=(1.0,))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: LDMConfig(form="duel"), "form is 'duel'.*recurrent, dual, fused"),
        (lambda: MixerConfig(backward="undo"), "backward is 'undo'.*stored, remat"),
        (lambda: MixerConfig(kind="x"), "kind is 'x'.*preln, ldm"),
        (lambda: MixerConfig(ldm=None), "ldm is None.*LDMConfig"),
        (lambda: DataConfig(corpora="books"), "corpora is 'books'.*list"),
        (lambda: DataConfig(corpora=("a", 3)), "corpora, element 2 is 3.*string"),
        (lambda: DataConfig(corpora=("a",), weights=(float("nan"),)), "weights, element 1 is nan"),
        (lambda: LDMConfig(key_dim=2.5), "key_dim is 2.5.*whole number"),
        (lambda: LDMConfig(groups=True), "groups is True.*whole number"),
        (lambda: LDMConfig(unit_keys=1), "unit_keys is 1.*true or false"),
        (lambda: LDMConfig(initial_gain=float("nan")), "initial_gain is nan"),
        (lambda: LDMConfig(initial_gain=float("inf")), "initial_gain is inf"),
        (lambda: LDMConfig(alpha=1e300), "alpha is 1e.300"),
    ],
)
@pytest.mark.usefixtures("unchecked_annotations")
def test_options_are_checked_in_python_too(make, words):
    with pytest.raises(ValueError, match=words):
        make()


def test_a_byte_order_mark_is_no_part_of_a_config(tmp_path):
    (tmp_path / "a.toml").write_text("[model]\ndepth = 3\n", encoding="utf-8-sig")
    assert read_config(tmp_path / "a.toml").model.depth == 3
