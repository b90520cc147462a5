"""Commands: they parse and call; no arithmetic."""
