"""Deployments over many machines: the part of each, and the manifests of a Kubernetes cluster."""
