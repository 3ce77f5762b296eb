"""Engines: each loads one checkpoint in its own process and shows what it computes."""
