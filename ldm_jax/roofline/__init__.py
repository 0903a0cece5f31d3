"""What a step would cost on accelerators that are absent: compiled memory, HBM bytes, flops, collectives, bounds."""
