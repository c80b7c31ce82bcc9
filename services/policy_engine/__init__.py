"""The policy engine: how many replicas each scaled service gets, and which are awake in each pool."""
