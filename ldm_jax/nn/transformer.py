"""The language model: embedding, stacked blocks with a depth mixer, norm and head."""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from ldm_jax.config import ModelConfig, Remat
from ldm_jax.memory.depth_scan import depth_map, depth_scan
from ldm_jax.mixers import MixerConfig, MixerState, Stack, make_ends
from ldm_jax.nn.attention import Documents, make_documents
from ldm_jax.nn.block import Block
from ldm_jax.nn.cache import Cache, next_places
from ldm_jax.nn.initializers import rms_norm
from ldm_jax.nn.loss import TokenLosses, chunked_cross_entropy
from ldm_jax.parameters import Declaration, linear
from ldm_jax.sharding import Axis, constrain
from ldm_jax.typing import Hidden, Logits, Scalar, Tokens


class Transformer(nnx.Module):
    """A decoder-only language model. Parameters are float32; the blocks' parameters have a leading depth axis.

    Raises:
        ValueError: the mixer's options do not match the width.
    """

    def __init__(self, config: ModelConfig, mixer: MixerConfig, *, rngs: nnx.Rngs):
        self.config = config
        self.backward = mixer.backward_or_default
        width, dtype = config.width, config.dtype
        start = nnx.initializers.normal(width**-0.5)
        table = {"declaration": Declaration((Axis.VOCABULARY, Axis.WIDTH), decays=True)}
        self.embed = nnx.Embed(
            config.vocabulary, width, embedding_init=start, dtype=dtype, rngs=rngs, embedding_metadata=table
        )
        self.blocks = jax.vmap(lambda index, key: Block(config, mixer, index, rngs=nnx.Rngs(key)))(
            jnp.arange(config.depth), jax.random.split(rngs.blocks(), config.depth)
        )
        ends_rngs = nnx.Rngs(rngs.mixer())
        self.mixer = make_ends(mixer, Stack(width, config.sublayers, dtype, config.scan), ends_rngs)
        self.norm = rms_norm(width, config, rngs)
        axes = Axis.WIDTH, Axis.VOCABULARY
        self.head = None if config.tied else linear(width, config.vocabulary, axes, muon=False, dtype=dtype, rngs=rngs)

    def hidden(self, tokens: Tokens, segments: Int[Array, "B T"] | None = None) -> Hidden:
        """The head's input: `norm(finish(blocks(start(embedding))))`, `[B, T, D]` in the compute type.

        Args:
            tokens: `[B, T]`.
            segments: number of each token's document, for windows of packed documents. A token attends to its own
                document only, and positions are counted from the document's first token in the window.
        """
        documents = None if segments is None else make_documents(segments)
        state = self._apply_blocks(self.mixer.start(self.embedding(tokens)), documents)
        return self.norm(self.mixer.finish(state))

    def decode(self, tokens: Tokens, cache: Cache) -> tuple[Hidden, Cache]:
        """The head's input for new tokens `[B, T]`, which follow those in the cache, and the updated cache.

        Takes one token per sequence, or as many as there are empty slots in the cache; see `next_places`.
        """
        places = next_places(cache, tokens.shape[1])
        state, layers = depth_map(
            lambda layer, state: layer[0].decode(state, layer[1], places),
            self.mixer.start(self.embedding(tokens)),
            (self.blocks, cache.layers),
            scan=self.config.scan,
        )
        hidden = self.norm(self.mixer.finish(state))
        return hidden, cache._replace(layers=layers, length=cache.length + tokens.shape[1])

    def embedding(self, tokens: Tokens) -> Hidden:
        """The embedding of tokens, `[B, T, D]` in the compute type."""
        # Rows of the table have norm 1 initially, which suits a tied head. Scaled, their entries have size 1.
        table = self._gathered(self.embed.embedding[...], Axis.VOCABULARY, Axis.WIDTH)
        rows = jnp.take(table, tokens, axis=0)
        if self.config.scale_embedding:
            rows *= jnp.asarray(self.config.width**0.5, self.config.dtype)
        return constrain(rows, Axis.BATCH, Axis.TOKENS, None)

    def head_matrix(self) -> Float[Array, "D S"]:
        """The head's weights, in the compute type."""
        if self.head is None:
            return self._gathered(self.embed.embedding[...], Axis.VOCABULARY, Axis.WIDTH).T
        return self._gathered(self.head.kernel[...], Axis.WIDTH, Axis.VOCABULARY)

    def _gathered(self, table: Float[Array, "m n"], *axes: Axis) -> Float[Array, "m n"]:
        """A table in the compute type, gathered along its width."""
        # The first constraint makes XLA cast before the gather; otherwise it gathers float32.
        cast = constrain(table.astype(self.config.dtype), *axes)
        return constrain(cast, *(None if axis is Axis.WIDTH else axis for axis in axes))

    def logits(self, hidden: Float[Array, "*tokens D"]) -> Float[Array, "*tokens S"]:
        """The logits of the next token, at least float32: the head's products are not rounded to the compute type."""
        return _logits(hidden, self.head_matrix())

    def __call__(self, tokens: Tokens) -> Logits:
        """The logits of the next token at every position, `[B, T, S]`, float32."""
        return self.logits(self.hidden(tokens)).astype(jnp.float32)

    def token_losses(self, tokens: Tokens, targets: Tokens, segments: Int[Array, "B T"] | None = None) -> TokenLosses:
        """The losses of every target, without materialising the logits of all tokens. Segments as in `hidden`."""
        head = self.head_matrix()  # outside of the chunks, so that it is gathered once
        hidden = self.hidden(tokens, segments)
        return chunked_cross_entropy(hidden, targets, lambda part: _logits(part, head), self.config.loss_chunk)

    def loss(self, tokens: Tokens, targets: Tokens) -> Scalar:
        """The mean cross-entropy in nats, float32."""
        return jnp.mean(self.token_losses(tokens, targets).cross_entropy)

    def _apply_blocks(self, state: MixerState, documents: Documents | None = None) -> MixerState:
        config = self.config
        policy = jax.checkpoint_policies.dots_with_no_batch_dims_saveable if config.remat is Remat.DOTS else None
        return depth_scan(
            lambda block, state: block(state, documents),
            state,
            self.blocks,
            backward=self.backward,
            undo=lambda block, state, residual: block.undo(state, residual),
            scan=config.scan,
            policy=policy,
        )


@jax.custom_jvp
def _logits(hidden: Float[Array, "*tokens D"], head: Float[Array, "D S"]) -> Float[Array, "*tokens S"]:
    """Logits that are at least float32. Their gradient has the compute type, as that of every other matmul."""
    return jnp.matmul(hidden, head, preferred_element_type=jnp.promote_types(hidden.dtype, jnp.float32))


@_logits.defjvp
def _logits_jvp(primals: tuple[Array, Array], tangents: tuple[Array, Array]) -> tuple[Array, Array]:
    (hidden, head), (of_hidden, of_head) = primals, tangents
    logits = _logits(hidden, head)
    return logits, (of_hidden @ head + hidden @ of_head).astype(logits.dtype)
