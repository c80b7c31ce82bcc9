"""Request traces: reading recorded ones, generating seeded ones, and fitting either to a fleet.

`model` is what a trace is made of, `readers` reads Azure CSV, Mooncake JSONL and Trimtab's own JSONL (plain or gzip),
`generators` makes load with shifting popularity, `shaping` slices, scales, deals
and sums up, `demo` is the demo's load.
Everything is pure or a plain file read, and equal seeds give equal traces, bit for bit.
"""

from simulator.traces.model import TraceError, TraceRequest

__all__ = ["TraceError", "TraceRequest"]
