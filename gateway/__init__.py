"""The reference gateway: an HTTP proxy in front of vLLM servers that sends requests to routable replicas only.

`gateway.core` decides and knows the wire formats; `gateway.shell` moves the bytes and follows endpoint sets. Run it
with ``python -m gateway``. It is one asyncio process; run several for more load. It keeps no request over a restart.
"""
