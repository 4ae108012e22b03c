"""Adapters of libraries with recurrent PPO; each needs its library."""

ADAPTERS = {
    "recurl": "Recurl",
}
"""Class of each adapter, by the name of its library; it is in the module of that name (with underscores)."""
