"""What the pre-scheduler does to the world: store, actuators, gRPC."""
