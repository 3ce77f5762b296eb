"""Modules that `env create sglang` copies into the environment; nothing imports them from here."""
