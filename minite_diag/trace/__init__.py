"""What one engine produced for one plan, on disk."""
