"""Small tasks of other kinds than classification, beside float32: ``python -m benchmarks.tasks``."""
