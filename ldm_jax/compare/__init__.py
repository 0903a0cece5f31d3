"""Comparisons of depth mixers: runs at tuned learning rates over seeds, their costs, tables and plots."""
