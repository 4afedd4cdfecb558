"""All tests share compiled programs, also with the processes they start; most of their time is compilation."""

import os
import tempfile

os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", tempfile.mkdtemp(prefix="safeicrl-tests-"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.3")
# Half the optimisation: programs that run for seconds are not worth the whole.
os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=1")
