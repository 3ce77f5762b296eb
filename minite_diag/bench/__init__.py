"""What the tool costs, measured: every claim is a ratio of one run on one machine."""
