"""Redis as Trimtab uses it: keys, documents, bounded streams, leases with fencing tokens, and its clock."""
