"""`python -m services.orchestrator`; --help tells the settings."""

from outrider.polling import poll_directly

if __name__ == "__main__":
    poll_directly()

    from services.orchestrator.service import main

    main()
