"""The shipped `demo-moe` checkpoint and the script that trained it; nothing here is imported."""
