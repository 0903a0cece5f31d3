"""The baseline mixers against NumPy references (values, gradients, sources), and against PreLN at initialisation."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import reference_mixers as reference
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
    reference: object


BASELINES = {
    "attnres": Baseline(MixerConfig(kind=MixerKind.ATTNRES), reference.attnres),
    "hc static": Baseline(
        MixerConfig(kind=MixerKind.HC, hc=HyperConfig(3, dynamic=False)), functools.partial(reference.hyper, streams=3)
    ),
    "hc dynamic": Baseline(
        MixerConfig(kind=MixerKind.HC, hc=HyperConfig(3)), functools.partial(reference.hyper, streams=3)
    ),
    "mhc": Baseline(MixerConfig(kind=MixerKind.MHC, mhc=MHCConfig(3)), functools.partial(reference.mhc, streams=3)),
}
for size in (1, 2, 4, 5, 9):
    BASELINES[f"attnres_block {size}"] = Baseline(
        MixerConfig(kind=MixerKind.ATTNRES_BLOCK, attnres_block=AttnResBlockConfig(size)),
        functools.partial(reference.attnres_block, block_size=size),
    )
for dilation, period in ((1, 1), (2, 1), (1, 2), (3, 2)):
    BASELINES[f"denseformer {dilation} {period}"] = Baseline(
        MixerConfig(kind=MixerKind.DENSEFORMER, denseformer=DenseFormerConfig(dilation, period)),
        functools.partial(reference.denseformer, dilation=dilation, period=period),
    )
each_baseline = pytest.mark.parametrize("baseline", BASELINES.values(), ids=BASELINES.keys())


def make(config, scanned):
    """The graphs and the initial parameters of the layers, `[blocks, ..]` for each half of a block, and of the ends."""
    stack = Stack(WIDTH, SUBLAYERS, jnp.float64, scanned)

    def pair(block):
        rngs = nnx.Rngs(jax.random.fold_in(jax.random.key(1), block))
        return [make_layer(config, stack, Place(block, last), rngs) for last in (False, True)]

    layers, ends = jax.vmap(pair)(jnp.arange(BLOCKS)), make_ends(config, stack, nnx.Rngs(0))
    return nnx.split(layers), nnx.split(ends)


@functools.cache
def graphs(config, scanned):
    """The graphs of the layers and of the ends."""
    return tuple(graph for graph, _ in jax.eval_shape(lambda: make(config, scanned)))


def initial_params(config):
    """Initial parameters of the layers and of the ends, in float64, so that they share programs with moved ones."""
    return jax.tree.map(lambda x: x.astype(jnp.float64), tuple(params for _, params in make(config, True)))


def moved(tree, rng):
    """Parameters that are far from their initial values and without symmetries."""
    return jax.tree.map(lambda leaf: leaf + 0.4 * rng.normal(size=leaf.shape), tree)


def random_matrices(rng):
    """`W` `[D, D]` of each sublayer `tanh(W n(x))`."""
    return jnp.asarray(rng.normal(size=(BLOCKS, 2, WIDTH, WIDTH)))


def random_embedding(rng):
    return jnp.asarray(rng.normal(size=(*TOKENS, WIDTH)))


def run(config, scanned, backward, params, ends_params, matrices, embedding):
    """The mixer over all sublayers."""
    graph, ends_graph = graphs(config, scanned)
    ends = nnx.merge(ends_graph, ends_params)

    def step(layer, state):
        params, pair = layer
        stream, residuals = state.stream, []
        for mixer, matrix in zip(nnx.merge(graph, params), pair, strict=True):
            x, state = mixer.read(state)
            normed = x / jnp.sqrt(jnp.mean(x**2, axis=-1, keepdims=True) + 1e-6)
            state, residual = mixer.write(state, jnp.tanh(normed @ matrix.T))
            residuals.append(residual)
        return state, (stream, residuals)

    def undo(layer, state, residual):
        memory, (stream, residuals) = state.memory, residual
        for mixer, own in reversed(list(zip(nnx.merge(graph, layer[0]), residuals, strict=True))):
            memory = mixer.undo(memory, own)
        return type(state)(stream, memory)

    state = ends.start(embedding)
    return ends.finish(depth_scan(step, state, (params, matrices), backward=backward, undo=undo, scan=scanned))


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def result_and_gradients(config, scanned, backward, weight, *arguments):
    """The mixer's result, and the gradients of its weighted sum with respect to all arguments of `run`."""

    def loss(*arguments):
        result = run(config, scanned, backward, *arguments)
        return jnp.sum(weight * result), result

    (_, result), grads = jax.value_and_grad(loss, argnums=(0, 1, 2, 3), has_aux=True)(*arguments)
    return result, grads


def as_in_models(config, weight, *arguments):
    """`result_and_gradients` by a scan, with the mixer's default backward mode."""
    return result_and_gradients(config, True, config.backward_or_default, weight, *arguments)


def for_reference(params, ends_params, matrices):
    """Parameters and sublayers as the references take them."""
    plain = jax.tree.map(np.asarray, [nnx.to_pure_dict(params), nnx.to_pure_dict(ends_params)])
    layers = [
        jax.tree.map(lambda x, b=b: x[b], plain[0][half]) if half in plain[0] else {}
        for b in range(BLOCKS)
        for half in (0, 1)
    ]
    matrices = np.asarray(matrices).reshape(-1, WIDTH, WIDTH)
    sublayers = [lambda x, W=W: np.tanh(W @ (x / reference.rms(x))) for W in matrices]
    return layers, plain[1], sublayers


def random_arguments(config, rng):
    params, ends_params = (moved(tree, rng) for tree in initial_params(config))
    return params, ends_params, random_matrices(rng), random_embedding(rng)


@each_baseline
def test_equals_its_reference_in_values_and_gradients(rng, x64, baseline):
    arguments = random_arguments(baseline.config, rng)
    weight = rng.normal(size=(*TOKENS, WIDTH))

    def expected(params, ends_params, matrices, embedding):
        return baseline.reference(np.asarray(embedding)[0], *for_reference(params, ends_params, matrices))[None]

    result, grads = as_in_models(baseline.config, weight, *arguments)
    expected_result = expected(*arguments)
    # Some hundred roundings of 1e-16 of the largest entry.
    np.testing.assert_allclose(result, expected_result, rtol=0, atol=1e-13 * np.abs(expected_result).max())
    # Directional derivatives, one for each leaf, against central differences of the reference.
    leaves, tree = jax.tree.flatten(arguments)
    for place, grad in enumerate(jax.tree.leaves(grads)):
        direction = rng.normal(size=np.shape(leaves[place]))

        def along(step, place=place, direction=direction):
            changed = [leaf + step * direction if i == place else leaf for i, leaf in enumerate(leaves)]
            return np.sum(weight * expected(*jax.tree.unflatten(tree, changed)))

        difference = (along(1e-5) - along(-1e-5)) / 2e-5
        # Rounding: 1e-16 of the sum's terms, over the step. Truncation: the step's square, times third derivatives.
        terms = np.abs(weight * expected_result).sum()
        np.testing.assert_allclose(np.sum(np.asarray(grad) * direction), difference, rtol=1e-6, atol=1e-8 * terms)


def slow(*arguments):
    return pytest.param(*arguments, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("name", "backward"),
    [
        # Only these two have another state in a loop: a growing cache.
        ("attnres", Backward.STORED),
        ("denseformer 3 2", Backward.STORED),
        *(slow(name, Backward.STORED) for name in ("attnres_block 4", "hc dynamic", "mhc")),
        *(slow(name, None) for name in ("attnres", "attnres_block 4", "hc dynamic", "mhc", "denseformer 3 2")),
    ],
)
def test_a_loop_over_layers_has_the_same_gradients(rng, x64, name, backward):
    config = BASELINES[name].config
    arguments, weight = random_arguments(config, rng), rng.normal(size=(*TOKENS, WIDTH))
    actual = result_and_gradients(config, False, backward or config.backward_or_default, weight, *arguments)
    expected = as_in_models(config, weight, *arguments)
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        # Sums of some hundred terms in another order: relative to the largest entry.
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-13 * float(jnp.abs(b).max()))


@each_baseline
def test_equals_preln_at_initialisation(rng, x64, baseline):
    # Up to the norm that follows: a mean of the sources is their sum times a factor, and epsilon does not scale.
    config = baseline.config
    (params, ends_params), embedding, matrices = initial_params(config), random_embedding(rng), random_matrices(rng)
    normed = lambda x: x / np.sqrt(np.mean(np.square(x), axis=-1, keepdims=True))  # noqa: E731
    result = lambda params: as_in_models(config, np.ones((*TOKENS, WIDTH)), params, ends_params, matrices, embedding)[0]  # noqa: E731
    sublayers = for_reference(params, ends_params, matrices)[2]
    expected = reference.preln(embedding[0], None, None, sublayers)[None]
    if config.kind is MixerKind.MHC:  # approximately, because the initial phi is small but not 0
        np.testing.assert_allclose(normed(result(params)), normed(expected), rtol=0, atol=1e-2)
        params = jax.tree_util.tree_map_with_path(
            lambda path, leaf: leaf * 0 if "phi" in jax.tree_util.keystr(path) else leaf, params
        )
    # Normed entries have size 1; the epsilons of 1e-6 in the norms change them by 1e-5.
    np.testing.assert_allclose(normed(result(params)), normed(expected), rtol=0, atol=1e-4)


# The sources of every read; each is a list of the outputs that it is the sum of. Output 0 is the embedding.
SOURCES_IN_BLOCKS_OF_4 = [
    [[0]],
    [[0], [1]],
    [[0], [1, 2]],
    [[0], [1, 2, 3]],
    [[0], [1, 2, 3, 4]],
    [[0], [1, 2, 3, 4], [5]],
    [[0], [1, 2, 3, 4], [5, 6]],  # the last read
]
AVERAGES_OF_DILATION_2 = {1: [1], 2: [2, 0], 3: [3, 1]}
"""The blocks' outputs over which blocks 1, 2 and 3 average; output 0 is the embedding."""


def reads_of_unit_vectors(config, change=lambda params: params):
    """The inputs of the sublayers and of the final norm, if the embedding and the outputs are unit vectors 0, 1, ..."""
    width = SUBLAYERS + 1
    stack = Stack(width, SUBLAYERS, jnp.float32, scanned=True)
    ends = make_ends(config, stack, nnx.Rngs(0))
    layers = [make_layer(config, stack, Place(i // 2, bool(i % 2)), nnx.Rngs(0)) for i in range(SUBLAYERS)]
    graph, params = nnx.split(layers)

    @jax.jit
    def read_all(params):
        state, reads = ends.start(jnp.eye(width)[:1][None]), []
        for index, layer in enumerate(nnx.merge(graph, params)):
            x, state = layer.read(state)
            reads.append(x[0, 0])
            state, _ = layer.write(state, jnp.eye(width)[index + 1][None, None])
        return [*reads, ends.finish(state)[0, 0]]

    return read_all(change(params))


@pytest.mark.parametrize(
    ("config", "sources"),
    [
        (MixerConfig(kind=MixerKind.ATTNRES), [[[i] for i in range(reader + 1)] for reader in range(SUBLAYERS + 1)]),
        (BASELINES["attnres_block 4"].config, SOURCES_IN_BLOCKS_OF_4),
    ],
    ids=["full", "block"],
)
def test_the_exact_sources_of_attnres(config, sources):
    # Initially all sources have the same weight, so a read shows the sources and their number.
    for read, expected in zip(reads_of_unit_vectors(config), sources, strict=True):
        vector = np.zeros(SUBLAYERS + 1)
        for source in expected:
            vector[source] = 1 / len(expected)
        np.testing.assert_allclose(read, vector, rtol=0, atol=3e-7)  # a few roundings of weights of at most 1
    assert reference.block_sources(SUBLAYERS, 4) == SOURCES_IN_BLOCKS_OF_4


def test_the_exact_sources_of_denseformer():
    # With all weights 1, the stream after a block is the sum of the outputs over which it averages. Each of them is the
    # stream before that block plus the outputs of its two sublayers.
    config = MixerConfig(kind=MixerKind.DENSEFORMER, denseformer=DenseFormerConfig(dilation=2))
    reads = reads_of_unit_vectors(config, lambda params: jax.tree.map(jnp.ones_like, params))
    outputs, stream = [np.eye(SUBLAYERS + 1)[0]], np.eye(SUBLAYERS + 1)[0]
    for block, chosen in AVERAGES_OF_DILATION_2.items():
        np.testing.assert_array_equal(reads[2 * block - 2], stream)  # small integers, exact in float32
        outputs.append(stream + np.eye(SUBLAYERS + 1)[2 * block - 1] + np.eye(SUBLAYERS + 1)[2 * block])
        stream = sum(outputs[i] for i in chosen)
    np.testing.assert_array_equal(reads[-1], stream)


def test_mixing_matrices_are_doubly_stochastic_and_not_transposed(rng):
    logits = jnp.asarray(rng.normal(size=(50, 4, 4)), jnp.float32)
    matrices = np.asarray(sinkhorn(logits))
    np.testing.assert_allclose(matrices.sum(axis=-1), 1, rtol=1e-6)  # rows are scaled last: a few roundings
    np.testing.assert_allclose(matrices.sum(axis=-2), 1, rtol=1e-3)  # 20 rounds do not converge further
    for matrix, own in zip(matrices, logits, strict=True):
        # Entries are at most 1; 40 logsumexps of 6e-8 each.
        np.testing.assert_allclose(matrix, reference.sinkhorn(np.asarray(own, np.float64)), rtol=0, atol=1e-5)
    assert np.isfinite(sinkhorn(jnp.asarray([[200.0, -200.0], [0.0, 100.0]]))).all()


@pytest.mark.parametrize("kind", [MixerKind.HC, MixerKind.MHC])
def test_several_streams_are_not_reversible(kind):
    with pytest.raises(ValueError, match=rf"backward is reversible.*{kind}.*remat"):
        MixerConfig(kind=kind, backward=Backward.REVERSIBLE)
    assert MixerConfig(kind=kind).backward_or_default is Backward.REMAT


@pytest.mark.parametrize(
    ("make_options", "pattern"),
    [
        (lambda: AttnResBlockConfig(0), "block_size is 0"),
        (lambda: HyperConfig(0), "streams is 0"),
        (lambda: MHCConfig(0), "streams is 0"),
        (lambda: MHCConfig(initial_diagonal=-9.0), "initial_diagonal is -9.0"),
        (lambda: DenseFormerConfig(dilation=0), "dilation is 0"),
        (lambda: DenseFormerConfig(period=-1), "period is -1"),
    ],
)
def test_options_out_of_range(make_options, pattern):
    with pytest.raises(ValueError, match=pattern):
        make_options()
