"""Shipped probe sets: see README.md in this folder."""
