"""The `trimtab` command: what people run. It starts services only as processes and speaks to them over gRPC."""
