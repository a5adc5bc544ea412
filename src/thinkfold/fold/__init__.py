"""Fold: compaction of the KV of finished segments. Pure functions over tensors; knows no engine, no pages, no model."""
