"""Benchmarks: each checks its results first and prints one JSON line with hardware and versions."""
