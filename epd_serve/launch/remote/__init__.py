"""Deployments on several machines: Kubernetes, Ray, and the part of each machine."""
