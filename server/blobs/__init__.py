"""Large files: models, updates and partial sums, on disk or in an S3 bucket."""
