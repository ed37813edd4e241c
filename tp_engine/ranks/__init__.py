"""Processes that act as one.

find each other    join
talk               comm: collectives; channel: plans; background: beside the steps;
                   symmetric: by memory that the GPUs of a host share
know of the end    liveness
"""
