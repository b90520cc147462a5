"""kvctl: how much memory a model's KV cache takes, to the byte."""

__version__ = "0.1.0"
