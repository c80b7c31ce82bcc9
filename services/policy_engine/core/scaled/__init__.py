"""Scaled services: from signals to units to replicas of each role. Imports of `shared` alone."""
