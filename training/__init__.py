"""The recipe that made Pebble: traces, tokenizer, data, training and measuring."""
