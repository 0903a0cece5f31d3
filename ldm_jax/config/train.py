"""The `[train]` section of a config."""

import re
from dataclasses import dataclass

from ldm_jax.options import check, check_at_least, check_option_types


@dataclass(frozen=True)
class TrainConfig:
    """The training loop."""

    steps: int = 1000
    """Total number of updates. A higher value continues a finished run."""
    batch_size: int = 8
    """B: windows per update."""
    accumulation: int = 1
    """Number of microbatches whose gradients are accumulated; it must divide batch_size."""
    seed: int = 0
    """Random seed of the initial parameters and of the order of the data."""
    validate_every: int = 200
    """Steps between validations; there is always one after the last step."""
    validation_windows: int = 64
    """Windows per validation, spread evenly over the validation text."""
    checkpoint_every: int = 200
    """Steps between checkpoints; there is always one after the last step."""
    checkpoints: str | None = None
    """Directory of the checkpoints, which may be in a bucket: gs://BUCKET/DIRECTORY (pip install 'ldm_jax[gcs]').
    None: RUN/checkpoints."""
    keep_checkpoints: int = 2
    """Number of latest checkpoints that are kept."""
    keep_every: int | None = None
    """Checkpoints at multiples of this step are never deleted. None: only the latest are kept."""
    spike_deviations: float | None = None
    """Skip updates whose loss is this many standard deviations above its running mean (typically 6). None: only skip
    updates whose loss or gradient is not finite."""
    skips_in_a_row: int = 10
    """Stop the run after this many skipped updates in a row."""
    sample_prompt: str = "def "
    """Prompt of the sample that is printed at the end."""
    sample_tokens: int = 200
    """Number of tokens in that sample."""

    def __post_init__(self) -> None:
        check_option_types(self)
        check_at_least(
            self, 1, "steps", "batch_size", "accumulation", "validate_every", "validation_windows",
            "checkpoint_every", "keep_checkpoints", "skips_in_a_row", "sample_tokens",
        )  # fmt: skip
        check_at_least(self, 0, "seed")
        check(self.steps < 2**31, f"steps is {self.steps}, but it must be less than 2^31.")
        check(
            self.batch_size % self.accumulation == 0,
            f"accumulation is {self.accumulation}, which does not divide batch_size {self.batch_size}.",
        )
        for name in ("keep_every", "spike_deviations"):
            value = getattr(self, name)
            check(value is None or value > 0, f"{name} is {value}, but it must be positive.")
        where = self.checkpoints
        check(where != "", "checkpoints is empty, but it must name a directory; leave it out for RUN/checkpoints.")
        check(
            where is None or re.match(r"\w+:/", where) is None or re.match(r"gs://[^/]+/+[^/]", where) is not None,
            f"checkpoints is {where}, but a bucket must be given as gs://BUCKET/DIRECTORY; others are not supported.",
        )
        check(bool(self.sample_prompt), 'sample_prompt is empty, but it must have a character, such as "\\n".')
        is_text = not any("\ud800" <= character <= "\udfff" for character in self.sample_prompt)
        check(is_text, f"sample_prompt is {self.sample_prompt!a}, which is not text.")
        check(self.seed < 2**32, f"seed is {self.seed}, but it must be less than 2^32.")
