"""Conformance and fault checks for any OpenAI-compatible multimodal server."""
