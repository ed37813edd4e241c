"""Entry points: the server, the sharding validator, the benchmarks and the demo.

``packages`` checks the import path, ``options`` reads the configuration, ``preflight`` checks the
host and the model before a weight is read. Importing this package imports nothing, so that
``--help`` answers at once.
"""
