"""A conformance and fault suite for any OpenAI-compatible multimodal endpoint; a client, as the load tester is."""
