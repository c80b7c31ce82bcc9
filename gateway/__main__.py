"""`python -m gateway`."""

from gateway.shell.serve import serve
from gateway.shell.settings import GatewaySettings
from trimtab.rpc.run import main

if __name__ == "__main__":
    main("gateway", GatewaySettings, serve)
