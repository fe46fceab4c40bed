"""Starting a deployment's processes on this machine, and stopping all of them again."""
