"""A request at the engine's border.

in     admission: what it must satisfy; seeds: for those that bring none
out    outputs: what a turn of the engine says of it; completion: the answer of offline use
"""
