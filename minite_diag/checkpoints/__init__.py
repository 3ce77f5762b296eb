"""Checkpoints: resolve, read, choose linears, calibrate and export."""
