"""The actuator of one cluster: existence, GPUs, life cycle and visibility of its replicas."""
