"""Settings of the services, and the YAML resources that users write."""
