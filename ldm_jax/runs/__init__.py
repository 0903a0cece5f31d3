"""A run on disk: its directory, its training state, and the checkpoints of it."""
