"""Tests, one folder an area."""
