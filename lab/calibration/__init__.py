"""Fits Token Service Share to a model and its SLO from runs at fixed capacity, and measures how well it ranks health.

Nothing here runs in a control loop: the result is a block of a ServicePolicy, applied like any other change.
"""
