"""Measured times of steps, and the budgets that follow from them."""
