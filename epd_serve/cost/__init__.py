"""Costs of stages, alone and beside each other, and of moving bytes between them."""
