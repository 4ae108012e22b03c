"""Networks over TensorDicts: recurrent modules, actors, critics, distributions."""

from typing import TYPE_CHECKING

from recurl.core.lazy import lazy_names

if TYPE_CHECKING:
    from recurl.core.precision import get_recurrent_matmul_precision, set_recurrent_matmul_precision
    from recurl.modules.actors import ActorValueOperator, ProbabilisticActor, ValueOperator
    from recurl.modules.agents_as_rows import AgentsAsRows
    from recurl.modules.blocks import (
        CellOptions,
        FFMModule,
        GatedDeltaNetModule,
        GTrXLModule,
        LRUModule,
        Mamba2Module,
        MinGRUModule,
        MinLSTMModule,
        MLSTMModule,
        RGLRUModule,
        S5Module,
        SHMModule,
        SLSTMModule,
    )
    from recurl.modules.cell_module import CellModule
    from recurl.modules.distributions import (
        Categorical,
        MaskedCategorical,
        MaskedOneHotCategorical,
        NormalParamExtractor,
        OneHotCategorical,
        TanhNormal,
    )
    from recurl.modules.exploration import AdditiveGaussianModule, EGreedyModule
    from recurl.modules.images import ImageEncoder, ImageScale
    from recurl.modules.joint import (
        ActionDistribution,
        ActionPart,
        IndependentCategorical,
        IndependentNormal,
        action_parts,
    )
    from recurl.modules.lstm_gru import GRU, LSTM, GRUModule, LSTMModule
    from recurl.modules.networks import MLP, LearnedScale
    from recurl.modules.normalization import ObservationNorm, RewardScaler
    from recurl.modules.qvalue import QValueActor, QValueModule
    from recurl.modules.recurrent import RecurrentModule, canonicalize_rnn_subset
    from recurl.modules.separate_agents import SeparateAgents
    from recurl.modules.utils import get_env_transforms_from_module, get_primers_from_module, recurrent_modules
    from recurl.nn.rnn import GRUCell, LSTMCell
    from recurl.sequences.mode import (
        ExplorationType,
        exploration_type,
        recurrent_mode,
        set_exploration_type,
        set_recurrent_mode,
    )

lazy_names(
    __name__,
    {
        "recurl.core.precision": "get_recurrent_matmul_precision set_recurrent_matmul_precision",
        ".actors": "ActorValueOperator ProbabilisticActor ValueOperator",
        ".agents_as_rows": "AgentsAsRows",
        ".blocks": (
            "CellOptions FFMModule GTrXLModule GatedDeltaNetModule LRUModule MLSTMModule Mamba2Module MinGRUModule "
            "MinLSTMModule RGLRUModule S5Module SHMModule SLSTMModule"
        ),
        ".cell_module": "CellModule",
        ".distributions": (
            "Categorical MaskedCategorical MaskedOneHotCategorical NormalParamExtractor OneHotCategorical TanhNormal"
        ),
        ".exploration": "AdditiveGaussianModule EGreedyModule",
        ".images": "ImageEncoder ImageScale",
        ".joint": "ActionDistribution ActionPart IndependentCategorical IndependentNormal action_parts",
        ".lstm_gru": "GRU GRUModule LSTM LSTMModule",
        ".networks": "MLP LearnedScale",
        ".normalization": "ObservationNorm RewardScaler",
        ".qvalue": "QValueActor QValueModule",
        ".recurrent": "RecurrentModule canonicalize_rnn_subset",
        ".utils": "get_env_transforms_from_module get_primers_from_module recurrent_modules",
        ".separate_agents": "SeparateAgents",
        "recurl.nn.rnn": "GRUCell LSTMCell",
        "recurl.sequences.mode": (
            "ExplorationType exploration_type recurrent_mode set_exploration_type set_recurrent_mode"
        ),
    },
)

__all__ = [
    "GRU",
    "LSTM",
    "MLP",
    "ActionDistribution",
    "ActionPart",
    "ActorValueOperator",
    "AdditiveGaussianModule",
    "AgentsAsRows",
    "Categorical",
    "CellModule",
    "CellOptions",
    "EGreedyModule",
    "ExplorationType",
    "FFMModule",
    "GRUCell",
    "GRUModule",
    "GTrXLModule",
    "GatedDeltaNetModule",
    "ImageEncoder",
    "ImageScale",
    "IndependentCategorical",
    "IndependentNormal",
    "LRUModule",
    "LSTMCell",
    "LSTMModule",
    "LearnedScale",
    "MLSTMModule",
    "Mamba2Module",
    "MaskedCategorical",
    "MaskedOneHotCategorical",
    "MinGRUModule",
    "MinLSTMModule",
    "NormalParamExtractor",
    "ObservationNorm",
    "OneHotCategorical",
    "ProbabilisticActor",
    "QValueActor",
    "QValueModule",
    "RGLRUModule",
    "RecurrentModule",
    "RewardScaler",
    "S5Module",
    "SHMModule",
    "SLSTMModule",
    "SeparateAgents",
    "TanhNormal",
    "ValueOperator",
    "action_parts",
    "canonicalize_rnn_subset",
    "exploration_type",
    "get_env_transforms_from_module",
    "get_primers_from_module",
    "get_recurrent_matmul_precision",
    "recurrent_mode",
    "recurrent_modules",
    "set_exploration_type",
    "set_recurrent_matmul_precision",
    "set_recurrent_mode",
]
