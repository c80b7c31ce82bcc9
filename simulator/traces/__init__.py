"""Request traces: reading recorded ones, generating seeded ones, and fitting either to a fleet.

`model` is what a trace is made of. `readers` reads Azure, BurstGPT, Mooncake and Trimtab's own files (plain or gzip)
with the rows of `formats`; `servegen_files` reads ServeGen's clients, `servegen` makes requests of them. `streams`
makes requests of rates, gaps and `lengths`; `probes` and `diurnal` are made so, `catalogue` has them all by name.
`mixing` and `shaping` slice, scale, deal and mix, `describe` sums up. `generators` and `demo` are the demo's load.
Everything is pure or a plain file read, and equal seeds give equal traces, bit for bit.
"""

from simulator.traces.model import TraceError, TraceRequest

__all__ = ["TraceError", "TraceRequest"]
