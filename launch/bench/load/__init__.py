"""HTTP load: which requests come when, the clients that send them, and what they saw."""
