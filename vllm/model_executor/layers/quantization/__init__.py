"""Formats in which checkpoints store linear layers in 8 and 4 bits: docs/quantization.md."""
