"""The gateway of the local mode: a proxy in front of the vLLM servers that sends requests to routable replicas only.

`core` decides with `avoidance` and `succession`, `openai` and `sse` know the wire formats; all of them are pure.
`proxy` and `upstream` move the bytes, `actuators` and `registry` follow and acknowledge endpoint sets, which `routes`
makes one, `demand` tells the collector what arrives and what is held.
Limits: it is made for one process and one machine; it keeps no request after a restart.
"""
