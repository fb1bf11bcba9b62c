"""What is measured: models, their inputs and their steps."""
