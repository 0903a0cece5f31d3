"""The ordinary PreLN residual stream: `h <- h + f(norm(h))`. The state is the stream."""

from flax import nnx

from ldm_jax.typing import Hidden


class PreLNLayer(nnx.Module):
    """Reads the stream and adds to it. Nothing is learned."""

    def read(self, state: Hidden) -> Hidden:
        """The stream."""
        return state

    def write(self, state: Hidden, output: Hidden) -> Hidden:
        """The stream plus the output."""
        return state + output


class PreLNEnds(nnx.Module):
    """The stream starts as the embedding and is handed on as it ends. Nothing is learned."""

    def start(self, embedding: Hidden) -> Hidden:
        """The embedding."""
        return embedding

    def finish(self, state: Hidden) -> Hidden:
        """The stream."""
        return state
