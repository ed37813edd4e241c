"""A step, from what rank 0 says of it to what every rank makes of it.

says        plan: the protocol; worker: who follows it
arrays      host_step: made of a plan; step_shape: their sizes; transfer: their way to the
            device; step: there
computes    runner: one rank's execution of plans; graphs: captured steps; warm_up: before the
            first request
"""
