"""Fits the packaged profiles to measured tables; run by `python -m lab.fit_profiles`.

Limits: dense models with grouped-query attention in bfloat16; no mixture of experts, no pipeline parallelism.
"""
