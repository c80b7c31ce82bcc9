"""I/O of the policy engine: store, actuators, gRPC, and the loop that calls the core and carries out its decisions."""
