"""Autoscalers to compare with, each by its documented rules and defaults, as pure policies on one interface.

`interface` is what they see and answer, `catalogue` has them by name, `tuning` finds their best thresholds. No policy
here knows of another model's demand; the oracle knows the future.
"""
