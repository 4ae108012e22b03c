"""Foundations that import no other part of recurl: keys, errors, specs, archives, seeding."""
