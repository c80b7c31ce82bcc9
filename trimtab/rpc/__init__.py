"""What every gRPC server and client of Trimtab shares: bootstrap, errors, validation, watches, health."""
