"""The OpenAI API's endpoints."""
