"""The HTTP gateway: the OpenAI API in front of encode, prefill and decode instances. Never imports torch."""
