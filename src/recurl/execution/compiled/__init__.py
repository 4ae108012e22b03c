"""Compilation of networks for recurl's C++ library: one call for all that a policy computes in a step."""

from typing import TYPE_CHECKING

from recurl.core.lazy import lazy_names

if TYPE_CHECKING:
    from recurl.execution.compiled.compilation import Compilation, Density, Signal
    from recurl.execution.compiled.descent import CompiledSurrogate, SurrogateData, SurrogateOptions
    from recurl.execution.compiled.function import CompiledFunction, OneRow, function_of
    from recurl.execution.compiled.in_memory import StepsInMemory
    from recurl.execution.compiled.network import CompiledNetwork
    from recurl.execution.compiled.passes import CompiledPass, check_passes
    from recurl.execution.compiled.program_file import Recorder, read_function, write_function
    from recurl.execution.compiled.translations import register_density, register_translation
    from recurl.execution.explain import NotCompiled

lazy_names(
    __name__,
    {
        ".compilation": "Compilation Density Signal",
        ".descent": "CompiledSurrogate SurrogateData SurrogateOptions Descent=CompiledSurrogate",
        ".function": "CompiledFunction OneRow function_of",
        ".in_memory": "StepsInMemory",
        ".network": "CompiledNetwork",
        ".passes": "CompiledPass check_passes can_pass=check_passes",
        ".program_file": "Recorder read_function write_function",
        ".translations": "register_density register_translation",
        "recurl.execution.explain": "NotCompiled",
    },
)

__all__ = [
    "Compilation",
    "CompiledFunction",
    "CompiledNetwork",
    "CompiledPass",
    "CompiledSurrogate",
    "Density",
    "NotCompiled",
    "OneRow",
    "Recorder",
    "Signal",
    "StepsInMemory",
    "SurrogateData",
    "SurrogateOptions",
    "check_passes",
    "function_of",
    "read_function",
    "register_density",
    "register_translation",
    "write_function",
]
