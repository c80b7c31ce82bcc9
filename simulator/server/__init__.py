"""One simulated vLLM server: an engine of `simulator.core` behind the HTTP surface that vLLM 0.32 shows."""
