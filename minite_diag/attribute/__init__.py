"""Where the gap is born and why."""
