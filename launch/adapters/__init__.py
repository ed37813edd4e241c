"""The operators' command line: ``python -m launch.adapters``.

`arguments` says what can be asked, `commands` does it through `client`, `tables` and `watching`
show what comes of it.
"""
