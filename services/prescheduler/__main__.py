"""``python -m prescheduler``."""

from prescheduler.shell.serve import serve
from prescheduler.shell.settings import PreSchedulerSettings
from trimtab.rpc.run import main

if __name__ == "__main__":
    main("prescheduler", PreSchedulerSettings, serve)
