"""``python -m metrics_collector``"""

from metrics_collector.shell.serve import serve
from metrics_collector.shell.settings import CollectorSettings
from trimtab.rpc.run import main

if __name__ == "__main__":
    main("metrics-collector", CollectorSettings, serve)
