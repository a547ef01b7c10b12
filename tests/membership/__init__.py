"""The checker of the agreement on views: a network in virtual time, seeded plans, all interleavings of few faults."""
