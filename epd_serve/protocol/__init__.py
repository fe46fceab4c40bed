"""Messages between gateway and instances, and the OpenAI schema that clients see."""
