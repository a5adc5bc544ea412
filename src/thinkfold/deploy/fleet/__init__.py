"""Many cores behind one engine: the same typed messages, placed, moved and merged. Knows nothing of Ray."""
