"""What this engine would run, without running it: its families, and one checkpoint at a time."""
