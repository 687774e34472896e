"""All that knows about several processes: who this one is, where it computes, what travels between them.

Nothing is imported here: `adasim.neighbors` takes `collectives` and `devices` along and needs torch and numpy alone.
"""
