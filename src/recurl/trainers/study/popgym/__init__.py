"""The benchmark on the tasks of POPGym: settings, score, results."""
