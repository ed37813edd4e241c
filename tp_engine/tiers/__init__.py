"""Adapters on their way up: store, hosts of all ranks, arenas of all ranks.

decides        tiers
store          fetching: reads, one at a time
hosts          delivery: to each rank its part; gains: what DoRA needs of the base;
               host_memory, host_pages: where they stand
arenas         copies: into them; room: how much there is; resident_ends: which of the
               adapters there change the embedding or the LM head
"""
