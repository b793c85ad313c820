"""LoRA: low-rank adapters that requests choose."""
