"""Runs engines in worker processes and writes what they compute to disk."""
