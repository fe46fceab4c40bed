"""Several processes of one gateway: one parent that holds the sockets, workers that serve, equal to each other."""
