"""The baseline mixers against independent twins in NumPy: values, gradients, sources, what they are at the start."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import twins
from ldm_jax.memory import Backward, depth_scan
from ldm_jax.mixers import (
    AttnResBlockConfig,
    DenseFormerConfig,
    HyperConfig,
    MHCConfig,
    MixerConfig,
    MixerKind,
    Place,
    Stack,
    make_ends,
    make_layer,
)
from ldm_jax.mixers.mhc import sinkhorn

WIDTH, BLOCKS, TOKENS = 5, 3, (1, 2)
SUBLAYERS = 2 * BLOCKS


class Baseline(NamedTuple):
    config: MixerConfig
    twin: object


BASELINES = {
    "attnres": Baseline(MixerConfig(kind=MixerKind.ATTNRES), twins.attnres),
    "hc static": Baseline(
        MixerConfig(kind=MixerKind.HC, hc=HyperConfig(3, dynamic=False)), functools.partial(twins.hyper, streams=3)
    ),
    "hc dynamic": Baseline(
        MixerConfig(kind=MixerKind.HC, hc=HyperConfig(3)), functools.partial(twins.hyper, streams=3)
    ),
    "mhc": Baseline(MixerConfig(kind=MixerKind.MHC, mhc=MHCConfig(3)), functools.partial(twins.mhc, streams=3)),
}
for size in (1, 2, 4, 5, 9):
    BASELINES[f"attnres_block {size}"] = Baseline(
        MixerConfig(kind=MixerKind.ATTNRES_BLOCK, attnres_block=AttnResBlockConfig(size)),
        functools.partial(twins.attnres_block, block_size=size),
    )
for dilation, period in ((1, 1), (2, 1), (1, 2), (3, 2)):
    BASELINES[f"denseformer {dilation} {period}"] = Baseline(
        MixerConfig(kind=MixerKind.DENSEFORMER, denseformer=DenseFormerConfig(dilation, period)),
        functools.partial(twins.denseformer, dilation=dilation, period=period),
    )
each_baseline = pytest.mark.parametrize("baseline", BASELINES.values(), ids=BASELINES.keys())


def make(config, scanned):
    """The layers, `[blocks, ..]` for each half of a block, and the ends."""

    def pair(block):
        rngs = nnx.Rngs(jax.random.fold_in(jax.random.key(1), block))
        return [
            make_layer(config, Stack(WIDTH, SUBLAYERS, jnp.float64, scanned), Place(block, last), rngs)
            for last in (False, True)
        ]

    ends = make_ends(config, Stack(WIDTH, SUBLAYERS, jnp.float64, scanned), nnx.Rngs(0))
    return jax.vmap(pair)(jnp.arange(BLOCKS)), ends


def moved(tree, rng):
    """Every parameter moved from where it starts; norms so far that nothing is symmetric."""
    return jax.tree.map(lambda leaf: leaf + 0.4 * rng.normal(size=leaf.shape), tree)


def functions(rng):
    """The sublayers: `tanh(W n(x))`, `W` `[D, D]` for each."""
    return jnp.asarray(rng.normal(size=(BLOCKS, 2, WIDTH, WIDTH)))


def run(config, params, ends_params, matrices, embedding, *, scanned=True, backward=Backward.STORED):
    """The mixer over all sublayers."""
    layers, ends = make(config, scanned)
    graph, ends_graph = nnx.split(layers)[0], nnx.split(ends)[0]
    ends = nnx.merge(ends_graph, ends_params)

    def step(layer, state):
        params, pair = layer
        stream, kept = state.stream, []
        for mixer, matrix in zip(nnx.merge(graph, params), pair, strict=True):
            x, state = mixer.read(state)
            normed = x / jnp.sqrt(jnp.mean(x**2, axis=-1, keepdims=True) + 1e-6)
            state, part = mixer.write(state, jnp.tanh(normed @ matrix.T))
            kept.append(part)
        return state, (stream, kept)

    def undo(layer, state, kept):
        memory = state.memory
        for mixer, part in reversed(list(zip(nnx.merge(graph, layer[0]), kept[1], strict=True))):
            memory = mixer.undo(memory, part)
        return type(state)(kept[0], memory)

    state = ends.start(embedding)
    return ends.finish(depth_scan(step, state, (params, matrices), backward=backward, undo=undo, scan=scanned))


def as_twin(params, ends_params, matrices):
    """Parameters and sublayers as the twins take them."""
    plain = jax.tree.map(np.asarray, [nnx.to_pure_dict(params), nnx.to_pure_dict(ends_params)])
    layers = [
        jax.tree.map(lambda x, b=b: x[b], plain[0][half]) if half in plain[0] else {}
        for b in range(BLOCKS)
        for half in (0, 1)
    ]
    sublayers = [lambda x, W=W: np.tanh(W @ (x / twins.rms(x))) for W in np.asarray(matrices).reshape(-1, WIDTH, WIDTH)]
    return layers, plain[1], sublayers


def problem(config, rng):
    layers, ends = make(config, True)
    params, ends_params = moved(nnx.state(layers), rng), moved(nnx.state(ends), rng)
    return params, ends_params, functions(rng), jnp.asarray(rng.normal(size=(*TOKENS, WIDTH)))


@each_baseline
def test_equals_its_twin_in_values_and_gradients(rng, x64, baseline):
    arguments = problem(baseline.config, rng)
    weight = rng.normal(size=(*TOKENS, WIDTH))

    def twin(params, ends_params, matrices, embedding):
        return baseline.twin(np.asarray(embedding)[0], *as_twin(params, ends_params, matrices))[None]

    def loss(*arguments):
        result = run(baseline.config, *arguments, scanned=False)
        return jnp.sum(weight * result), result

    (_, result), grads = jax.value_and_grad(loss, argnums=(0, 1, 2, 3), has_aux=True)(*arguments)
    np.testing.assert_allclose(result, twin(*arguments), rtol=0, atol=1e-12)
    # Directional derivatives, one for each leaf, against central differences of the twin: error of order h^2.
    leaves, tree = jax.tree.flatten(arguments)
    for place, grad in enumerate(jax.tree.leaves(grads)):
        direction = rng.normal(size=np.shape(leaves[place]))

        def along(step, place=place, direction=direction):
            changed = [leaf + step * direction if i == place else leaf for i, leaf in enumerate(leaves)]
            return np.sum(weight * twin(*jax.tree.unflatten(tree, changed)))

        difference = (along(1e-5) - along(-1e-5)) / 2e-5
        np.testing.assert_allclose(np.sum(np.asarray(grad) * direction), difference, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("scanned", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", ["attnres", "attnres_block 4", "hc dynamic", "mhc", "denseformer 3 2"])
def test_scanned_unrolled_and_reversed_are_one(rng, x64, name, scanned):
    baseline = BASELINES[name]
    arguments = problem(baseline.config, rng)

    def grads(**options):
        loss = lambda *arguments: jnp.sum(jnp.sin(run(baseline.config, *arguments, **options)))  # noqa: E731
        return jax.value_and_grad(loss, argnums=(0, 1, 2, 3))(*arguments)

    expected, actual = grads(scanned=False), grads(scanned=scanned, backward=baseline.config.backward_or_default)
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        # Sums of some hundred terms in another order: relative to the largest entry.
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-13 * float(jnp.abs(b).max()))


@each_baseline
def test_is_preln_at_the_start(rng, x64, baseline):
    # Up to the norm that follows: a mean of the sources and their sum differ by a factor, and eps does not scale.
    layers, ends = make(baseline.config, True)
    params, embedding, matrices = nnx.state(layers), jnp.asarray(rng.normal(size=(*TOKENS, WIDTH))), functions(rng)
    normed = lambda x: x / np.sqrt(np.mean(np.square(x), axis=-1, keepdims=True))  # noqa: E731
    sublayers = as_twin(params, nnx.state(ends), matrices)[2]
    expected = twins.preln(embedding[0], None, None, sublayers)[None]
    if baseline.config.kind is MixerKind.MHC:  # with its small random phi it is near
        result = run(baseline.config, params, nnx.state(ends), matrices, embedding)
        np.testing.assert_allclose(normed(result), normed(expected), atol=1e-2)
        params = jax.tree_util.tree_map_with_path(
            lambda path, leaf: leaf * 0 if "phi" in jax.tree_util.keystr(path) else leaf, params
        )
    result = run(baseline.config, params, nnx.state(ends), matrices, embedding)
    np.testing.assert_allclose(normed(result), normed(expected), atol=1e-4)


# Which outputs a reader is given: 0 is the embedding, i the output of sublayer i; each list is one source.
SOURCES_IN_BLOCKS_OF_4 = [
    [[0]],
    [[0], [1]],
    [[0], [1, 2]],
    [[0], [1, 2, 3]],
    [[0], [1, 2, 3, 4]],
    [[0], [1, 2, 3, 4], [5]],
    [[0], [1, 2, 3, 4], [5, 6]],  # the reader of the end
]
AVERAGES_OF_DILATION_2 = {1: [1], 2: [2, 0], 3: [3, 1]}
"""What block 1, 2 and 3 average over: outputs of blocks, 0 being the embedding."""


def readings(config, change=lambda params: params):
    """What every sublayer and the end are given, where the embedding is unit vector 0 and output i unit vector i."""
    width = SUBLAYERS + 1
    stack = Stack(width, SUBLAYERS, jnp.float32, scanned=True)
    ends = make_ends(config, stack, nnx.Rngs(0))
    state, seen = ends.start(jnp.eye(width)[:1][None]), []
    for index in range(SUBLAYERS):
        layer = make_layer(config, stack, Place(index // 2, bool(index % 2)), nnx.Rngs(0))
        graph, params = nnx.split(layer)
        layer = nnx.merge(graph, change(params))
        x, state = layer.read(state)
        seen.append(x[0, 0])
        state, _ = layer.write(state, jnp.eye(width)[index + 1][None, None])
    return [*seen, ends.finish(state)[0, 0]]


@pytest.mark.parametrize(
    ("config", "sources"),
    [
        (MixerConfig(kind=MixerKind.ATTNRES), [[[i] for i in range(reader + 1)] for reader in range(SUBLAYERS + 1)]),
        (BASELINES["attnres_block 4"].config, SOURCES_IN_BLOCKS_OF_4),
    ],
    ids=["full", "block"],
)
def test_the_exact_sources_of_attnres(config, sources):
    # At the start every source has the same weight, so a reading shows which outputs it is made of, and how many parts.
    for seen, expected in zip(readings(config), sources, strict=True):
        vector = np.zeros(SUBLAYERS + 1)
        for source in expected:
            vector[source] = 1 / len(expected)
        np.testing.assert_allclose(seen, vector, atol=1e-7)
    assert twins.block_sources(SUBLAYERS, 4) == SOURCES_IN_BLOCKS_OF_4


def test_the_exact_sources_of_denseformer():
    # With all weights 1, a block's stream is the sum of the outputs it averages over; each is the stream before it plus
    # what its two sublayers wrote.
    config = MixerConfig(kind=MixerKind.DENSEFORMER, denseformer=DenseFormerConfig(dilation=2))
    seen = readings(config, lambda params: jax.tree.map(jnp.ones_like, params))
    outputs, stream = [np.eye(SUBLAYERS + 1)[0]], np.eye(SUBLAYERS + 1)[0]
    for block, chosen in AVERAGES_OF_DILATION_2.items():
        np.testing.assert_allclose(seen[2 * block - 2], stream)
        outputs.append(stream + np.eye(SUBLAYERS + 1)[2 * block - 1] + np.eye(SUBLAYERS + 1)[2 * block])
        stream = sum(outputs[i] for i in chosen)
    np.testing.assert_allclose(seen[-1], stream)


def test_mixing_matrices_are_doubly_stochastic_and_not_transposed(rng):
    logits = jnp.asarray(rng.normal(size=(50, 4, 4)))
    matrices = np.asarray(sinkhorn(logits))
    np.testing.assert_allclose(matrices.sum(axis=-1), 1, atol=1e-6)  # rows are scaled last
    np.testing.assert_allclose(matrices.sum(axis=-2), 1, atol=1e-3)  # 20 rounds, and no more
    for matrix, own in zip(matrices, logits, strict=True):
        np.testing.assert_allclose(matrix, twins.sinkhorn(np.asarray(own, np.float64)), atol=1e-5)
    assert np.isfinite(sinkhorn(jnp.asarray([[200.0, -200.0], [0.0, 100.0]]))).all()


@pytest.mark.parametrize("kind", [MixerKind.HC, MixerKind.MHC])
def test_mixed_streams_cannot_be_undone(kind):
    with pytest.raises(ValueError, match=rf"{kind}.*cannot be undone.*remat"):
        MixerConfig(kind=kind, backward=Backward.REVERSIBLE)
    assert MixerConfig(kind=kind).backward_or_default is Backward.REMAT


@pytest.mark.parametrize(
    ("make_options", "sentence"),
    [
        (lambda: AttnResBlockConfig(0), "block_size is 0.*at least 1"),
        (lambda: HyperConfig(0), "streams is 0"),
        (lambda: MHCConfig(0), "streams is 0"),
        (lambda: MHCConfig(initial_diagonal=-9.0), "initial_diagonal is -9.0.*between -8 and 8"),
        (lambda: DenseFormerConfig(dilation=0), "dilation is 0"),
        (lambda: DenseFormerConfig(period=-1), "period is -1"),
    ],
)
def test_options_out_of_range(make_options, sentence):
    with pytest.raises(ValueError, match=sentence):
        make_options()
