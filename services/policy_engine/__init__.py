"""The policy engine: how many replicas each scaled service gets, and who is awake in each pool."""
