"""thinkfold's policy over an OpenAI-compatible server: the same typed messages, another core."""
