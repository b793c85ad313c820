"""Reports on what this engine can run, made without running it: families and checkpoints."""
