"""The choice of the next token, and what constrains it."""
