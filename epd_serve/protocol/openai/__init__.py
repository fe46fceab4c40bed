"""What clients say and hear: the OpenAI API."""
