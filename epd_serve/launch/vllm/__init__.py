"""vLLM instances: their command lines, and what the installed vLLM can do."""
