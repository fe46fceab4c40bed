"""The HTTP gateway: OpenAI API in front, encode, prefill and decode instances behind. Never imports torch."""
