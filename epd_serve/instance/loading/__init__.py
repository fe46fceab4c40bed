"""The model of an instance: from a checkpoint, or from its shape alone."""
