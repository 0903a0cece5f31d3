"""Which depth mixer is better: runs at tuned rates over seeds, their costs, tables and plots."""
