"""What goes wrong with the store, named by what the caller should do."""


class StoreUnavailable(Exception):
    """The store did not answer in time, or not at all: hold, keep serving, try again at the next tick.

    A write that failed so may have been carried out all the same.
    """


class EtagMismatch(Exception):
    """A document is not what the writer based its change on: read it again."""

    def __init__(self, name: str, *, expected_etag: str, current_etag: str) -> None:
        self.name = name
        self.expected_etag = expected_etag
        self.current_etag = current_etag
        if not current_etag:
            text = f"{name!r} does not exist; expected etag {expected_etag!r}"
        elif not expected_etag:
            text = f"{name!r} exists already, with etag {current_etag!r}"
        else:
            text = f"{name!r} was changed meanwhile: etag is {current_etag!r}, expected {expected_etag!r}"
        super().__init__(text)


class FencedOff(Exception):
    """Another owner holds the lease by now: drop what was to be written and stop leading."""

    def __init__(self, lease_name: str, *, token: int, current_token: int) -> None:
        self.lease_name = lease_name
        self.token = token
        self.current_token = current_token
        super().__init__(f"token {token} of {lease_name!r} is fenced off: {current_token} is newer")


class CorruptEntry(Exception):
    """A stored value does not parse; the message names its key."""
