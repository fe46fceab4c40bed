"""The OpenAI API between clients and the gateway: requests, answers, events."""
