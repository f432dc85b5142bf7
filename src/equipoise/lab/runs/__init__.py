"""Run folders, and trained models opened from them."""
