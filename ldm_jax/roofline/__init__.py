"""What would a step cost on accelerators that are absent? Memory, matmuls, HBM bytes, collectives, time bounds."""
