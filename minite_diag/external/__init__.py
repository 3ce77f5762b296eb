"""Traces from outside: what another tool measured, as a run that can be compared and gated."""
