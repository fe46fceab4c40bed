"""Text in and out of an instance: chat templates, tokens, grammars, and the threads that make them."""
