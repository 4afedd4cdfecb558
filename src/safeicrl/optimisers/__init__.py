"""Policy optimisers of SCARED: the paper's iteration (Eq. 6) leaves this choice open."""
