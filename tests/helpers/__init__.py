"""Factories and oracles shared by the tests."""
