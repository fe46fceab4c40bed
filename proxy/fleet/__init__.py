"""The instances of a gateway: who they are, whether they work, for how long they stay."""
