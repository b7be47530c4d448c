"""`python -m services.target`; --help tells the settings."""

import os

from outrider.polling import poll_directly

if __name__ == "__main__":
    # An OpenMP thread that waits for its next parallel region spins, by default for milliseconds,
    # right when the other tier wants the core. libgomp reads this when torch is loaded.
    os.environ.setdefault("GOMP_SPINCOUNT", "20000")

    poll_directly()

    from services.target.service import main

    main()
