"""Load on an OpenAI-compatible server, and what its answers say of it."""
