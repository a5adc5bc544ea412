"""Who runs and how many tokens, as plain integers. No torch."""
