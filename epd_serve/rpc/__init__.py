"""Calls between the processes of a deployment."""
