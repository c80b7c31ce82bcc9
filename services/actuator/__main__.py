"""``python -m actuator``: the actuator of one cluster."""

from actuator.shell.serve import serve
from actuator.shell.settings import ActuatorSettings
from trimtab.rpc.run import main

if __name__ == "__main__":
    main("actuator", ActuatorSettings, serve)
