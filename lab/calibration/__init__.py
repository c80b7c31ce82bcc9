"""Fits Token Service Share to a model and its SLO from runs at fixed capacity, and says how well it ranks health.

Nothing here runs in a control loop: what comes out is a block of a ServicePolicy, applied like any other change.
"""
