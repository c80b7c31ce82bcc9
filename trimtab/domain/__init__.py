"""Value types that services share, each with its one codec to the messages of the contract."""
