"""Networks of a run: encoders, recurrent trunks, actors, critics and Q-networks."""

from recurl.trainers.networks import cpp_forms as cpp_forms  # registers them
