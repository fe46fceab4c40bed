"""Messages between gateway and instances, and the API schemas that clients see."""
