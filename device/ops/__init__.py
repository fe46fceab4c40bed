"""Attention and layer operators: a reference in plain torch and one file per backend."""
