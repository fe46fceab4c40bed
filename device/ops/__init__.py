"""Attention and layer operators: the oracle in plain torch and one file per backend."""
