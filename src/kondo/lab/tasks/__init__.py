"""Tasks: each draws its own inputs, lets a policy act, and pays. None needs a download."""
