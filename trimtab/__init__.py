"""Trimtab: a gRPC control plane that decides how many GPUs each LLM service gets, and carries it out."""

__version__ = "0.1.0"
