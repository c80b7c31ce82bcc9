"""The pure part of the gateway: routing, wire formats and tallies. No I/O and no clock; `now_s` is an argument.

`routing` decides with `outlier_ejection`; `revision_order` orders endpoint sets; `openai` and `sse` know the wire
formats; `demand` counts what is reported to the collector; `readiness` answers the health check.
"""
