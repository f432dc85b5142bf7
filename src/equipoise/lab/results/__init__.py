"""What a trained run is good for: reports, tables, figures, certificates, predictions."""
