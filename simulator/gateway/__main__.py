"""`python -m simulator.gateway`."""

from simulator.gateway.app import serve
from simulator.gateway.settings import GatewaySettings
from trimtab.rpc.run import main

if __name__ == "__main__":
    main("gateway", GatewaySettings, serve)
