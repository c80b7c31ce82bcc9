"""A simulated vLLM fleet: the serving model, servers with vLLM's HTTP surface, traces and the replay client.

`simulator.core` is pure and runs on virtual time; `simulator.server` puts one engine behind vLLM's HTTP API;
`simulator.fleet` hosts many such servers in one process behind an admin API. Nothing here decides about scaling.
"""
