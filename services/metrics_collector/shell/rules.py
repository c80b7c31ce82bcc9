"""What holds for the requests to each service's targets, from the settings: names to ask for, token, TLS."""

import contextlib
import sys
from collections.abc import Sequence

import structlog

from metrics_collector.core.targets import Target
from metrics_collector.shell.client import ClientRules
from metrics_collector.shell.request import RequestHeads, TokenFile, tls_context
from metrics_collector.shell.settings import CollectorSettings
from trimtab.rpc.run import ServiceContext

log = structlog.get_logger(__name__)

_TOKEN_POLL_S = 1.0


class RulesByService:
    """The rules of each target. Token files are looked at once a second."""

    def __init__(self, settings: CollectorSettings, sample_names: Sequence[str]) -> None:
        """Raises ``StartupError`` naming the file that is missing or wrong."""
        tls = tls_context(settings.scrape_tls_ca_file, insecure_skip_verify=settings.scrape_tls_insecure_skip_verify)
        tokens = {
            path: TokenFile(path)
            for path in {settings.scrape_token_file, *settings.scrape_token_file_by_service.values()}
            if path is not None
        }

        def rules(token: TokenFile | None) -> ClientRules:
            return ClientRules(
                heads=RequestHeads(sample_names, filter_pages=settings.filter_pages, token=token),
                max_page_bytes=settings.max_page_bytes,
                gzip=settings.scrape_gzip,
                tls=tls,
                tls_server_name=settings.scrape_tls_server_name,
            )

        default = settings.scrape_token_file
        self._default = rules(tokens[default] if default is not None else None)
        self._by_service = {
            service: rules(tokens[path]) for service, path in settings.scrape_token_file_by_service.items()
        }
        self._tokens = tokens

    def of(self, target: Target) -> ClientRules:
        """The rules of one target."""
        return self._by_service.get(target.service, self._default)

    async def run(self, context: ServiceContext) -> None:
        """Take up changed tokens until the service stops."""
        while not await context.pause(_TOKEN_POLL_S):
            self.poll()

    def poll(self) -> None:
        """Look at the token files once."""
        changed = [path for path, token in self._tokens.items() if token.poll()]
        if changed:
            for rules in (self._default, *self._by_service.values()):
                rules.heads.build()
            log.info("token files read again", files=[str(path) for path in changed])


def raise_file_limit() -> None:
    """Every target has a connection of its own: take as many open files as the system lets this process have."""
    if sys.platform == "win32":
        return
    import resource  # not to be had on Windows

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
