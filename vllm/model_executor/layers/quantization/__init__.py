"""How checkpoints store their linear layers in 8 and 4 bits: docs/quantization.md."""
