"""Everything that acts in trials: the protocol, the in-context policy, the baselines."""
