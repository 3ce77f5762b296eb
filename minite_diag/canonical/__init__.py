"""From what an engine wrote to what the checkpoint calls it: names, shards, tokens, scales."""
