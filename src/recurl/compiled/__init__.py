"""Steps of networks as programs of recurl's C++ library: one call for all that a policy computes in a step."""

from recurl.compiled.compilation import Compilation, NotCompiled, Signal
from recurl.compiled.network import CompiledNetwork

__all__ = ["Compilation", "CompiledNetwork", "NotCompiled", "Signal"]
