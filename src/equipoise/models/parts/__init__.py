"""Parts shared by several models."""
