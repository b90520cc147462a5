"""AWQ: 4-bit weights with scales searched from what a model's layers are given (Lin et al. 2023, arXiv 2306.00978)."""
