"""Options of the training loop."""

from dataclasses import dataclass

from ldm_jax.options import check, check_at_least, check_option_types


@dataclass(frozen=True)
class TrainConfig:
    """The loop."""

    steps: int = 1000
    """Updates in all. Raising it continues a finished run."""
    batch_size: int = 8
    """B: windows of an update."""
    accumulation: int = 1
    """Parts that a batch is computed in, one after the other; they divide the batch size."""
    seed: int = 0
    """Of the parameters and of the order of the data."""
    validate_every: int = 200
    """Steps from one validation to the next; the last step is followed by one in any case."""
    validation_windows: int = 64
    """Windows of a validation during training, spread evenly over the validation text."""
    checkpoint_every: int = 200
    """Steps from one checkpoint to the next; the last step is followed by one in any case."""
    checkpoints: str | None = None
    """Folder of the checkpoints; a bucket, too, such as gs://bucket/run (pip install gcsfs). None: RUN/checkpoints."""
    keep_checkpoints: int = 2
    """Latest checkpoints that are kept."""
    keep_every: int | None = None
    """Checkpoints of steps that this divides are kept for good. None: only the latest."""
    spike_deviations: float | None = None
    """An update is skipped where its loss is so many standard deviations above the running mean of losses (6 is
    usual). None: only where loss or gradient are not finite."""
    skips_in_a_row: int = 10
    """After so many updates skipped one after the other the run stops."""
    sample_prompt: str = "def "
    """Start of the sample that is printed at the end."""
    sample_tokens: int = 200
    """Length of that sample."""

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
        check(where != "", "checkpoints is empty, but it must name a folder; leave it out for RUN/checkpoints.")
        check(
            where is None or "://" not in where or where.startswith(("gs://", "s3://")),
            f"checkpoints is {where}, but a bucket must be one of gs:// or s3://.",
        )
        check(bool(self.sample_prompt), 'sample_prompt is empty, but it needs a character, such as "\\n".')
        is_text = not any("\ud800" <= character <= "\udfff" for character in self.sample_prompt)
        check(is_text, f"sample_prompt is {self.sample_prompt!a}, which is not text.")
        check(self.seed < 2**32, f"seed is {self.seed}, but it must be less than 2^32.")
