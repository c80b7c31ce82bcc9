"""The pre-scheduler: maps absolute replica counts onto the topology, cycle by cycle."""
