"""The metrics collector: scrapes vLLM servers and publishes each role's window, with the quality of every value."""
