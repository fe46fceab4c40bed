"""One instance as a process: its stages as services behind a control server, and how they are put together."""
