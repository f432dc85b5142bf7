"""Finding data files and reading them within limits."""
