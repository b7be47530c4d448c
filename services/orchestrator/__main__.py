"""`python -m services.orchestrator`; --help tells the settings."""

from services.orchestrator.service import main

if __name__ == "__main__":
    main()
