"""The one room that knows about processes: who this one is, where it computes, what travels between them.

Nothing is imported here: `adasim.neighbors` takes `exchange` and `devices` along and needs torch and numpy alone."""
