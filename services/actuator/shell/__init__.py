"""I/O of the actuator: gRPC, store, backend, vLLM servers, loops."""
