"""Classifiers that a task vector adapts to new classes (Gurumurthy, Bai, Manchester and Kolter 2021, appendix B.1)."""
