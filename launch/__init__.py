"""Entry points: the server, the sharding validator, the benchmarks and the demo."""
