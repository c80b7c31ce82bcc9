"""The collector's I/O: target sources, scrapes, the store, gRPC. What is measured is decided in the core."""
