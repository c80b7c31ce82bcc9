"""The replay client: sends a trace to a gateway as its requests arrive, and reports what clients saw.

`prompts` makes the text, `client` sends and times, `report` is the result. The client counts losses by itself: an
answer is complete only when it ended as it should with every requested token.
"""

from simulator.replay.client import ReplayOptions, replay
from simulator.replay.report import Outcome, ReplayProgress, ReplayReport, RequestRecord

__all__ = ["Outcome", "ReplayOptions", "ReplayProgress", "ReplayReport", "RequestRecord", "replay"]
