"""Studies of what the simulator shows, each run by one command; they serve documentation, not the control plane."""
