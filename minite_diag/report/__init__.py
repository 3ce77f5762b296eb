"""Turns a run directory into what people read: terminal text and HTML. No torch."""
