"""The `trimtab` command. It starts services only as processes and calls them over gRPC."""

import os

# The commands that run a stack start processes while gRPC's threads are at work. A child execs at once and has no use
# for gRPC's fork handlers, which run in it all the same and may end it before that. Read when grpc is imported.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
