"""How fast training, generation and loading are on this machine."""
