"""I/O of the policy engine: store, actuators, gRPC, the loop that feeds the core and carries out what it says."""
