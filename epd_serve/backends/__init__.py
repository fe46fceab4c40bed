"""The callers' side of an instance's stage calls, one file per kind of instance."""
