"""How the report looks, in light and in dark."""

STYLE = """
:root { color-scheme: light dark; --text: #1c2024; --back: #ffffff; --soft: #5b636b; --line: #d5d9de; --band: #f3f5f7;
  --ok: #17693a; --miss: #a8201a; --link: #1d5bb8; }
@media (prefers-color-scheme: dark) {
  :root { --text: #e3e6ea; --back: #15181c; --soft: #9aa4ae; --line: #3a4149; --band: #1e2329;
    --ok: #6fd08f; --miss: #ff8b82; --link: #83b2ff; }
}
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1.5rem 1rem 4rem; max-width: 68rem; color: var(--text); background: var(--back);
  font: 16px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.7rem; line-height: 1.2; margin: 0 0 0.5rem; }
h2 { font-size: 1.3rem; margin: 2.5rem 0 0.5rem; border-bottom: 1px solid var(--line); }
p { max-width: 46rem; margin: 0.5rem 0; overflow-wrap: anywhere; }
a { color: var(--link); }
nav { color: var(--soft); }
.wide { overflow-x: auto; margin: 0.75rem 0; }
table { border-collapse: collapse; font-size: 0.8rem; font-variant-numeric: tabular-nums; }
th, td { padding: 0.2rem 0.55rem; border-bottom: 1px solid var(--line); }
thead th { vertical-align: bottom; color: var(--soft); font-weight: 600; text-align: left; }
.figures td, .figures thead th:not(:first-child) { text-align: right; }
.figures td { white-space: nowrap; }
.words td { overflow-wrap: anywhere; vertical-align: top; }
tbody th { text-align: left; font-weight: 600; white-space: nowrap; vertical-align: top; }
tbody tr:nth-child(even) { background: var(--band); }
small { color: var(--soft); font-weight: 400; }
.ok { color: var(--ok); font-weight: 600; white-space: nowrap; }
.miss { color: var(--miss); font-weight: 600; white-space: nowrap; }
.unjudged { white-space: nowrap; }
figure { margin: 1rem 0; overflow-x: auto; }
figure svg { width: 100%; min-width: 44rem; height: auto; display: block; }
figure svg * { stroke-linejoin: round; stroke-linecap: butt; }
figcaption { color: var(--soft); font-size: 0.85rem; }
details { margin: 0.4rem 0; }
summary { cursor: pointer; color: var(--link); }
pre { overflow-x: auto; font-size: 0.8rem; background: var(--band); padding: 0.75rem; }
"""
