"""Batches of view pairs: read, cut and delivered in an order that only the seed and the epoch decide."""
