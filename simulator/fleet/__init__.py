"""Many simulated vLLM servers in one process, behind an admin API that plays Kubernetes for the `local` backend."""
