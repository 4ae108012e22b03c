"""Networks of a run: encoders, recurrent trunks, actors, critics and Q-networks."""
