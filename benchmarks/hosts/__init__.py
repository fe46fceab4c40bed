"""Hosts on one machine: namespaces as machines, and a switch between them with rate, delay, loss and cuts."""
