"""Choice of the next token, and its constraints."""
