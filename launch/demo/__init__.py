"""The demo: a small quantised base, three adapters in different styles, one mixed batch."""
