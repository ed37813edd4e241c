"""Sampling over a vocabulary cut into shards: state by slot, shard work, choice on rank 0.

Reading order: `needs` (what a step asks for), `slots` (state), `shard` (every rank), `choose` and
`rng` (rank 0), `sampler` (the whole flow). What is done for every token of the vocabulary is done
by `kernels.sampling`.
"""

from tp_engine.sampling.needs import sampling_needs, slot_init
from tp_engine.sampling.sampler import Gatherer, Sampled, Sampler
from tp_engine.sampling.slots import SlotStates

__all__ = ["Gatherer", "Sampled", "Sampler", "SlotStates", "sampling_needs", "slot_init"]
