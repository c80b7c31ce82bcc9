"""Evaluates replays: SLO attainment, latencies and goodput of a pass, and one pass compared with another.

`statistics` sums up a replay, `comparison` compares the demo's two passes and has its figures and table. For suites
(`trimtab evaluate`): `suite` defines what one is, `catalogue` names them, `evaluating` runs one, `summaries`,
`confidence` and `study` hold the results, `documents`, `tables`, `plots` and `report` show them, `tuning` finds
thresholds.

All but `runner`, `outputs` and the file of `tuning` is pure. A lost request never counts as one within its SLO, and
never as a latency.
"""

from lab.evaluation.comparison import DemoSummary, PassFigures, summary_table
from lab.evaluation.statistics import PassSummary, Slo, summarise

__all__ = ["DemoSummary", "PassFigures", "PassSummary", "Slo", "summarise", "summary_table"]
