"""Shipped probe sets; the format is in README.md."""
