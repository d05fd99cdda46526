"""One record per run: what was done, how fast, and what limited it."""
