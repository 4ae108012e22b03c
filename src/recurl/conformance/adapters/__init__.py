"""Adapters of libraries with recurrent PPO; each needs its library."""

ADAPTERS = {
    "recurl": "recurl:Recurl",
    "cleanrl": "cleanrl:CleanRL",
    "memorax": "memorax:Memorax",
    "pufferlib": "pufferlib:PufferLib",
    "rllib": "rllib:RLlib",
    "rsl-rl": "rsl_rl:RslRl",
    "sb3-contrib": "sb3_contrib:Sb3Contrib",
    "skrl": "skrl:SkrlSameStep",
    "skrl-shared": "skrl:SkrlShared",
    "tianshou": "tianshou:Tianshou",
    "torchrl": "torchrl:TorchRL",
}
"""Module of this package and class of each adapter."""
