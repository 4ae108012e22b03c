"""Adapters of libraries with recurrent PPO; each needs its library."""
