"""Other people's quantizers, each in an environment of its own; nothing of them is ever installed beside kvctl."""
