"""`python -m policy_engine`."""

from policy_engine.shell.serve import serve
from policy_engine.shell.settings import EngineSettings
from trimtab.rpc.run import main

if __name__ == "__main__":
    main("policy-engine", EngineSettings, serve)
