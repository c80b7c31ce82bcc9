"""How each service's targets are scraped, from the settings: names to ask for, token, TLS."""

import contextlib
import sys
from collections.abc import Sequence
from pathlib import Path

import structlog

from metrics_collector.core.targets import Target
from metrics_collector.shell.client import ClientRules
from metrics_collector.shell.request import METRICS_PATH, RequestHeads, TokenFile, tls_context
from metrics_collector.shell.settings import CollectorSettings
from trimtab.domain.dialects.model import Dialect
from trimtab.rpc.run import ServiceContext

log = structlog.get_logger(__name__)

_TOKEN_POLL_S = 1.0


class ScrapeConfigs:
    """The rules of each target. Token files are looked at once a second."""

    def __init__(self, settings: CollectorSettings, dialects: Sequence[Dialect]) -> None:
        """Raises ``StartupError`` naming the file that is missing or wrong."""
        self._settings = settings
        self._names = {dialect.name: dialect.sample_names() for dialect in dialects}
        self._tls = tls_context(
            settings.scrape_tls_ca_file, insecure_skip_verify=settings.scrape_tls_insecure_skip_verify
        )
        self._tokens = {
            path: TokenFile(path)
            for path in {settings.scrape_token_file, *settings.scrape_token_file_by_service.values()}
            if path is not None
        }
        self._heads: list[RequestHeads] = []
        self._rules: dict[tuple[Path | None, str | None], ClientRules] = {}

    def _made(self, token_file: Path | None, full_path: str | None) -> ClientRules:
        """``full_path`` is where a target's page lies when it is no engine's own place: it is asked for whole."""
        settings = self._settings
        token = self._tokens[token_file] if token_file is not None else None

        def heads(names: Sequence[str]) -> RequestHeads:
            made = RequestHeads(
                names,
                filter_pages=settings.filter_pages and full_path is None,
                token=token,
                full_path=full_path or METRICS_PATH,
            )
            self._heads.append(made)
            return made

        by_dialect = {name: heads(names) for name, names in self._names.items()} if full_path is None else {}
        return ClientRules(
            heads=heads(sorted({name for names in self._names.values() for name in names})),
            heads_by_dialect=by_dialect,
            max_page_bytes=settings.max_page_bytes,
            gzip=settings.scrape_gzip,
            tls=self._tls,
            tls_server_name=settings.scrape_tls_server_name,
        )

    def of(self, target: Target) -> ClientRules:
        """The rules of one target."""
        settings = self._settings
        token_file = settings.scrape_token_file_by_service.get(target.service, settings.scrape_token_file)
        full_path = target.metrics_path or (METRICS_PATH if target.exporter else None)
        key = (token_file, full_path)
        rules = self._rules.get(key)
        if rules is None:
            rules = self._rules[key] = self._made(token_file, full_path)
        return rules

    async def run(self, context: ServiceContext) -> None:
        """Take up changed tokens until the service stops."""
        while not await context.pause(_TOKEN_POLL_S):
            self.poll()

    def poll(self) -> None:
        """Look at the token files once."""
        changed = [path for path, token in self._tokens.items() if token.poll()]
        if changed:
            for heads in self._heads:
                heads.build()
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
