"""The views of the page, one file each: which models they take, what they say of them, and their jobs."""
