"""A kubelet over namespaces: the pods of rendered manifests, on this machine."""
