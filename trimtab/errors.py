"""Errors that end a process with one clear line.

They are below every other module so that the store, the settings and the servers can raise them without
importing one another.
"""


class StartupError(Exception):
    """A process cannot start or go on, and the reader can do something about it.

    ``trimtab.rpc.run.main`` prints the message as one line and exits with status 1.
    """


class SettingsError(Exception):
    """A setting is wrong; the message is one line that names where it was set.

    ``trimtab.rpc.run.main`` prints it and exits with status 2.
    """
